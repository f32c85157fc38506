package segment

import (
	"errors"
	"fmt"
	"io"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/batch"
)

// readChunk is how much a scan reads at once.
const readChunk = 1 << 20

// Damage is the first thing in a file that does not verify. errors.Is(err, storage.ErrCorrupt).
type Damage struct {
	Pos    int64
	Reason error
}

func (d *Damage) Error() string { return fmt.Sprintf("damage at byte %d: %v", d.Pos, d.Reason) }

// Unwrap gives the reason, and storage.ErrCorrupt whatever it was.
func (d *Damage) Unwrap() []error { return []error{storage.ErrCorrupt, d.Reason} }

// ReadHeader reads and checks the header at the front of f.
func ReadHeader(f io.ReaderAt) (Header, []byte, error) {
	b := make([]byte, 16)
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return Header{}, nil, err
	}
	n, err := HeaderLength(b)
	if err != nil {
		return Header{}, nil, err
	}
	b = make([]byte, n)
	if got, err := f.ReadAt(b, 0); got < n {
		if err != nil && !errors.Is(err, io.EOF) {
			return Header{}, nil, err
		}
		return Header{}, nil, fmt.Errorf("segment header cut short: %w", storage.ErrCorrupt)
	}
	h, _, err := ParseHeader(b)
	return h, b, err
}

// Scan reads every batch of [t.Pos, limit) of f, verifies both CRCs and the chain of offsets, and adds it to t. fn, if not nil, sees each
// batch; it must not keep it. It stops at the first damage with a *Damage, t being what lies before. It writes nothing.
func Scan(f io.ReaderAt, t *Tally, limit int64, fn func(h *batch.Header, raw []byte) error) error {
	var buf []byte
	at := t.Pos // position of buf[0]
	for t.Pos < limit {
		rest := buf[t.Pos-at:]
		need := batch.HeaderSize
		if len(rest) >= need {
			h, err := batch.ParseHeader(rest)
			if err != nil {
				return &Damage{t.Pos, err}
			}
			need = h.Size()
			if t.Pos+int64(need) > limit {
				return &Damage{t.Pos, fmt.Errorf("batch of %d bytes runs over the end of the data at %d", need, limit)}
			}
			if len(rest) >= need {
				if err := scanned(t, rest[:need], fn); err != nil {
					return err
				}
				continue
			}
		}
		if t.Pos+int64(need) > limit {
			return &Damage{t.Pos, fmt.Errorf("%d bytes are no batch", limit-t.Pos)}
		}
		size := int(min(int64(max(need, readChunk)), limit-t.Pos))
		if cap(buf) < size {
			buf = make([]byte, 0, size)
		}
		n, err := f.ReadAt(buf[:size], t.Pos)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("read at byte %d: %w", t.Pos, err)
		}
		if n < need {
			return &Damage{t.Pos, fmt.Errorf("file ends at byte %d, before the end of its data at %d", t.Pos+int64(n), limit)}
		}
		buf, at = buf[:n], t.Pos
	}
	return nil
}

func scanned(t *Tally, raw []byte, fn func(h *batch.Header, raw []byte) error) error {
	h, err := batch.Verify(raw)
	if err != nil {
		return &Damage{t.Pos, err}
	}
	pos := t.Pos
	if err := t.Add(&h, raw); err != nil {
		return &Damage{pos, err}
	}
	if fn != nil {
		return fn(&h, raw)
	}
	return nil
}

// ReadFooter reads the footer of a sealed file of size bytes whose header is headerBytes long.
func ReadFooter(f io.ReaderAt, size, headerBytes int64) (Tally, error) {
	var trailer [trailerBytes]byte
	if size < headerBytes+footerFixed+trailerBytes {
		return Tally{}, fmt.Errorf("segment file of %d bytes has no footer: %w", size, storage.ErrCorrupt)
	}
	if _, err := f.ReadAt(trailer[:], size-trailerBytes); err != nil && !errors.Is(err, io.EOF) {
		return Tally{}, fmt.Errorf("read trailer: %w", err)
	}
	n, err := FooterLength(trailer[:])
	if err != nil {
		return Tally{}, err
	}
	if int64(n) > size-headerBytes {
		return Tally{}, fmt.Errorf("segment footer of %d bytes in a file of %d: %w", n, size, storage.ErrCorrupt)
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, size-int64(n)); err != nil && !errors.Is(err, io.EOF) {
		return Tally{}, fmt.Errorf("read footer: %w", err)
	}
	t, err := ParseFooter(b, headerBytes)
	if err == nil && t.Pos+int64(n) != size {
		return Tally{}, fmt.Errorf("segment footer at byte %d says that data end at %d: %w", size-int64(n), t.Pos, storage.ErrCorrupt)
	}
	return t, err
}

// Verify reads a whole sealed file: header, every batch, and that the footer is exactly what they give. It returns what it has verified,
// also on error. It writes nothing and trusts no name. fn as in Scan.
func Verify(f io.ReaderAt, size int64, fn func(h *batch.Header, raw []byte) error) (Header, Tally, error) {
	h, raw, err := ReadHeader(f)
	if err != nil {
		return Header{}, Tally{}, &Damage{0, err}
	}
	t := NewTally(h, len(raw))
	said, err := ReadFooter(f, size, int64(len(raw)))
	if err != nil {
		return h, t, &Damage{size, err}
	}
	if err := Scan(f, &t, said.Pos, fn); err != nil {
		return h, t, err
	}
	if err := equalFooter(f, &t, size); err != nil {
		return h, t, err
	}
	return h, t, nil
}

func equalFooter(f io.ReaderAt, t *Tally, size int64) error {
	want := t.Footer()
	if int64(len(want)) != size-t.Pos {
		return &Damage{t.Pos, fmt.Errorf("footer of %d bytes, batches give %d", size-t.Pos, len(want))}
	}
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, t.Pos); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read footer: %w", err)
	}
	for i := range got {
		if got[i] != want[i] {
			return &Damage{t.Pos + int64(i), errors.New("footer does not say what the batches give")}
		}
	}
	return nil
}

// RebuildFooter computes the footer of a sealed file from its verified batches and says where it belongs. Where the data end is known
// (wantEnd, wantDigest from a record) the batches must reach exactly it. Otherwise the batches must verify up to a place behind which
// exactly a footer's length is left, and that footer must chain to the same digest as the damaged one if its digest can still be read:
// a footer is rebuilt byte-equal or not at all. It writes nothing.
func RebuildFooter(f io.ReaderAt, size int64, want *Tally) (pos int64, footer []byte, err error) {
	h, raw, err := ReadHeader(f)
	if err != nil {
		return 0, nil, &Damage{0, err}
	}
	t := NewTally(h, len(raw))
	if want != nil {
		if err := Scan(f, &t, min(want.Pos, size), nil); err != nil {
			return 0, nil, err
		}
		if t.End != want.End || t.Digest != want.Digest {
			return 0, nil, &Damage{t.Pos, fmt.Errorf("batches end at %d with digest %016x, recorded are %d and %016x", t.End, uint64(t.Digest), want.End, uint64(want.Digest))}
		}
		return t.Pos, t.Footer(), nil
	}
	scanErr := Scan(f, &t, size, nil) // stops where the batches stop
	var damage *Damage
	if scanErr != nil && !errors.As(scanErr, &damage) {
		return 0, nil, scanErr
	}
	footer = t.Footer()
	if t.Pos+int64(len(footer)) != size {
		return 0, nil, &Damage{t.Pos, fmt.Errorf("%d bytes follow the last batch that verifies, its footer would be %d: %w", size-t.Pos, len(footer), storage.ErrCorrupt)}
	}
	return t.Pos, footer, nil
}
