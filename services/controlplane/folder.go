package controlplane

import (
	"bytes"
	"crypto/md5"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/lni/dragonboat/v4/raftpb"
	"golang.org/x/sys/unix"

	"github.com/malachilog/malachi/services/controlplane/root"
	"github.com/malachilog/malachi/storage"
)

// Files of the folder. What else there is belongs to the library.
const (
	identityFile = "IDENTITY"      // "cluster X broker Y\n": whose folder this is; made first, never changed
	levelFile    = "LEVEL"         // "level N\n": a process that understands less than N refuses the folder unread
	joinedFile   = "JOINED"        // "generation N joining\n", later "generation N\n": the replicas joined groups that others founded
	lockFile     = "LOCK.malachi"  // held while the folder is open
	statusFile   = "dragonboat.ds" // the library's record of what it was opened with
)

// inspectFolder reports whether the folder has never been used. It writes nothing. storage.ErrNewerFormat: a higher level than
// understood was met here; storage.ErrFolderRefused: it belongs to another broker or cluster.
func inspectFolder(dir string, id Identity, understood storage.Level) (fresh bool, err error) {
	level, err := readLevel(dir)
	if err != nil {
		return false, err
	}
	if level > understood {
		return false, fmt.Errorf("%s was written at level %d, this process understands %d: %w", dir, level, understood,
			storage.ErrNewerFormat)
	}
	b, err := os.ReadFile(filepath.Join(dir, identityFile))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("inspect the raft folder: %w", err)
	}
	if got := string(b); got != id.line() {
		return false, fmt.Errorf("%s belongs to %.80q, this is %q: %w", dir, strings.TrimSpace(got), strings.TrimSpace(id.line()),
			storage.ErrFolderRefused)
	}
	return false, nil
}

func (id Identity) line() string { return fmt.Sprintf("cluster %s broker %s\n", id.Cluster, id.Broker) }

// lockFolder makes the folder where it is missing and takes it for this process alone. The library's own locks do not keep out a
// second opening by the same process, and come too late for us. storage.ErrFolderRefused: in use.
func lockFolder(dir string) (io.Closer, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the raft folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the raft folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s is in use by another process: %w", dir, storage.ErrFolderRefused)
		}
		return nil, fmt.Errorf("lock the raft folder: %w", err)
	}
	return f, nil
}

// claimFolder writes whose folder this is. Afterwards the folder's name is durable too.
func claimFolder(dir string, id Identity) error {
	if err := syncDir(filepath.Dir(filepath.Clean(dir))); err != nil {
		return fmt.Errorf("claim the raft folder: %w", err)
	}
	return replaceFile(filepath.Join(dir, identityFile), []byte(id.line()))
}

// readLevel returns the highest level met in the folder, 0 if none is recorded.
func readLevel(dir string) (storage.Level, error) {
	b, err := os.ReadFile(filepath.Join(dir, levelFile))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the level of the raft folder: %w", err)
	}
	text, ok := strings.CutPrefix(strings.TrimSuffix(string(b), "\n"), "level ")
	n, err := strconv.ParseUint(text, 10, 32)
	if !ok || err != nil {
		return 0, fmt.Errorf("%s holds %.40q, want \"level N\": %w", filepath.Join(dir, levelFile), b, storage.ErrCorrupt)
	}
	return storage.Level(n), nil
}

// writeLevel records a level durably, unless it or a higher one is.
func writeLevel(dir string, level storage.Level) error {
	have, err := readLevel(dir)
	if err != nil || have >= level {
		return err
	}
	return replaceFile(filepath.Join(dir, levelFile), fmt.Appendf(nil, "level %d\n", level))
}

// openGeneration returns the generation of the folder's replicas, and raises it where id asks for a higher one. joined: they came into
// their groups by joining; no group was founded here. joining: not all of them have yet, so that one that is missing may be made.
func openGeneration(dir string, id Identity) (generation uint32, joined, joining bool, err error) {
	path := filepath.Join(dir, joinedFile)
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, false, false, fmt.Errorf("read the generation of the raft folder: %w", err)
	}
	if err == nil {
		text, joining := strings.CutSuffix(strings.TrimSuffix(string(b), "\n"), " joining")
		digits, ok := strings.CutPrefix(text, "generation ")
		n, err := strconv.ParseUint(digits, 10, 32)
		if !ok || err != nil || n > root.MaxGeneration {
			return 0, false, false, fmt.Errorf("%s holds %.40q, want \"generation N\": %w", path, b, storage.ErrCorrupt)
		}
		if uint32(n) >= id.Generation {
			return uint32(n), true, joining, nil
		}
	} else if id.Generation == 0 && !id.Joining {
		return 0, false, false, nil
	}
	if id.Generation > root.MaxGeneration {
		return 0, false, false, fmt.Errorf("generation %d: %w", id.Generation, storage.ErrInvalid)
	}
	// On disk before the first replica of the generation: a later start knows that what is missing was never there.
	if err := replaceFile(path, fmt.Appendf(nil, "generation %d joining\n", id.Generation)); err != nil {
		return 0, false, false, err
	}
	return id.Generation, true, true, nil
}

// completeGeneration records that all replicas are there. It is on disk before any of them may vote, so one that is missing
// afterwards is never made anew: it might forget a vote.
func completeGeneration(dir string, generation uint32) error {
	return replaceFile(filepath.Join(dir, joinedFile), fmt.Appendf(nil, "generation %d\n", generation))
}

// replaceFile writes a file whole or not at all, and durably.
func replaceFile(path string, data []byte) (err error) {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// adoptHostname makes a folder of another host name ours. The library keeps its data in a subdirectory named after the host and
// refuses a folder that was opened under another name; but a folder belongs to a broker id, and containers change their names. So
// the subdirectory is renamed, and the name is taken out of the library's record, which then does not look for it. Either step may
// be cut off by a crash and is done by the next start. The caller holds the folder's lock.
func adoptHostname(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("adopt the raft folder: %w", err)
	}
	hostname, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("adopt the raft folder: %w", err)
	}
	var old []string
	for _, e := range entries {
		if e.IsDir() {
			old = append(old, e.Name())
		}
	}
	switch {
	case len(old) > 1:
		return fmt.Errorf("%s holds the directories %v where one belongs: %w", dir, old, storage.ErrFolderRefused)
	case len(old) == 1 && old[0] != hostname:
		if err := os.Rename(filepath.Join(dir, old[0]), filepath.Join(dir, hostname)); err != nil {
			return fmt.Errorf("adopt the raft folder: %w", err)
		}
		if err := syncDir(dir); err != nil {
			return fmt.Errorf("adopt the raft folder: %w", err)
		}
	}
	return dropHostname(filepath.Join(dir, statusFile))
}

// dropHostname takes the host name out of the library's record: eight bytes of an MD5 sum, then a protobuf message.
func dropHostname(path string) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("adopt the raft folder: %w", err)
	}
	const sumBytes = 8
	var status raftpb.RaftDataStatus
	if len(b) < sumBytes || !bytes.Equal(b[:sumBytes], statusSum(b[sumBytes:])) || status.Unmarshal(b[sumBytes:]) != nil {
		return fmt.Errorf("%s does not verify: %w", path, storage.ErrCorrupt)
	}
	if status.Hostname == "" {
		return nil
	}
	status.Hostname = ""
	msg, err := status.Marshal()
	if err != nil {
		return fmt.Errorf("adopt the raft folder: %w", err)
	}
	return replaceFile(path, append(statusSum(msg), msg...))
}

func statusSum(b []byte) []byte {
	s := md5.Sum(b)
	return s[8:]
}
