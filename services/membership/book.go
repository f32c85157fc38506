package membership

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"time"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/vfs"
)

const (
	// maxBook bounds the brokers that are remembered.
	maxBook = 1024
	// maxBookBytes bounds what is read of the file.
	maxBookBytes = 1 << 20
	// bookWarnEvery is how often a file that can't be written is told of.
	bookWarnEvery = 10 * time.Minute
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// bookFile is the file's JSON, which a line with its CRC32C follows.
type bookFile struct {
	Format  int               `json:"format"`
	Cluster string            `json:"cluster_id"`
	Peers   map[string]*entry `json:"peers"` // by broker id
}

// loadBook reads the known brokers. A file that can't be used is said and passed over: the seeds help too.
func (m *Membership) loadBook() {
	if m.cfg.PeersFile == "" {
		return
	}
	f, err := readBook(m.deps.FS, m.cfg.PeersFile)
	switch {
	case vfs.IsNotExist(err):
		return
	case err == nil && f.Cluster != m.cfg.Cluster.String():
		err = fmt.Errorf("it is of cluster %s: %w", f.Cluster, storage.ErrInvalid)
	}
	if err != nil {
		m.log.Warn("the file of known brokers can't be used and will be written anew", "file", m.cfg.PeersFile, "error", err)
		return
	}
	for s, e := range f.Peers {
		if id, err := storage.ParseBrokerID(s); err == nil && e != nil && len(m.book) < maxBook {
			m.book[id] = e
		}
	}
}

func readBook(fs vfs.FS, name string) (b bookFile, err error) {
	f, err := fs.Open(name)
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	size, err := f.Size()
	if err != nil {
		return b, err
	}
	if size > maxBookBytes {
		return b, fmt.Errorf("%d bytes: %w", size, storage.ErrTooLarge)
	}
	raw := make([]byte, size)
	if n, err := f.ReadAt(raw, 0); err != nil && (!errors.Is(err, io.EOF) || n < len(raw)) {
		return b, err
	}
	body, sum, ok := strings.Cut(string(raw), "\n")
	if !ok || sum != sumLine(body) {
		return b, storage.ErrCorrupt
	}
	if err := json.Unmarshal([]byte(body), &b); err != nil {
		return b, fmt.Errorf("%w: %w", storage.ErrCorrupt, err)
	}
	if b.Format != 1 {
		return b, fmt.Errorf("format %d: %w", b.Format, storage.ErrNewerFormat)
	}
	return b, nil
}

func sumLine(body string) string {
	return fmt.Sprintf("crc32c %08x\n", crc32.Checksum([]byte(body), castagnoli))
}

// saveBook writes the known brokers, if they changed: whole, under another name, then renamed, so that a crash leaves the old or the new.
func (m *Membership) saveBook() {
	if m.cfg.PeersFile == "" {
		return
	}
	m.mu.Lock()
	if !m.dirty {
		m.mu.Unlock()
		return
	}
	m.dirty = false
	f := bookFile{Format: 1, Cluster: m.cfg.Cluster.String(), Peers: make(map[string]*entry, len(m.book))}
	for id, e := range m.book {
		copied := *e
		f.Peers[id.String()] = &copied
	}
	m.mu.Unlock()
	if err := writeBook(m.deps.FS, m.cfg.PeersFile, f); err != nil {
		m.mu.Lock()
		m.dirty = true
		m.mu.Unlock()
		if m.told.may("book", bookWarnEvery) {
			m.log.Warn("the file of known brokers is not written; trying again", "file", m.cfg.PeersFile, "error", err)
		}
	}
}

func writeBook(fs vfs.FS, name string, b bookFile) error {
	body, err := json.Marshal(b)
	if err != nil {
		return err
	}
	temp := name + ".tmp"
	if err := fs.Remove(temp); err != nil && !vfs.IsNotExist(err) {
		return err
	}
	f, err := fs.Create(temp)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(string(body)+"\n"+sumLine(string(body))), 0)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := fs.Rename(temp, name); err != nil {
		return err
	}
	return fs.SyncDir(".")
}
