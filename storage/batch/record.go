package batch

import (
	"encoding/binary"
	"fmt"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"

	"github.com/malachilog/malachi/storage"
)

// Record is one record. Whoever hands one out says how long its slices live.
type Record struct {
	// Key is nil if the record has none; a key of length 0 is another thing.
	Key []byte
	// Value may be empty. Nil and empty are the same.
	Value []byte
	// Headers keep their order and may repeat a key.
	Headers []RecordHeader
	// Time is the producer's time.
	Time storage.Time
}

// RecordHeader is one header of a record. Key is UTF-8.
type RecordHeader struct {
	Key   []byte
	Value []byte
}

// Bytes is the size that storage.MaxRecordBytes bounds: key, value, and the headers' keys and values.
func (r *Record) Bytes() int {
	n := len(r.Key) + len(r.Value)
	for i := range r.Headers {
		n += len(r.Headers[i].Key) + len(r.Headers[i].Value)
	}
	return n
}

// KeylessPosition is where the records without a key of a producer's batch live: xxhash64 (seed 0) of the id's 16 bytes and the
// sequence as 8 bytes, little endian. All of one batch share it, so a batch of keyless records never straddles ranges.
func KeylessPosition(id storage.ProducerID, sequence uint64) storage.Position {
	var b [24]byte
	copy(b[:], id[:])
	binary.LittleEndian.PutUint64(b[16:], sequence)
	return storage.Position(xxhash.Sum64(b[:]))
}

// KeylessPosition is the position of the batch's records without a key: by producer id and sequence, or, without an id, the
// lowest position of the batch.
func (h *Header) KeylessPosition() storage.Position {
	if h.Producer.IsZero() {
		return h.Lowest
	}
	return KeylessPosition(h.Producer, h.Sequence)
}

// CheckRecord holds r against the limits of one record. Errors: storage.ErrTooLarge, the text names the limit; storage.ErrInvalid
// for a header key that is not UTF-8.
func CheckRecord(r *Record) error {
	if len(r.Headers) > storage.MaxHeaders {
		return fmt.Errorf("record with %d headers, limit %d: %w", len(r.Headers), storage.MaxHeaders, storage.ErrTooLarge)
	}
	if len(r.Key) > storage.MaxKeyBytes {
		return fmt.Errorf("record key of %d bytes, limit %d: %w", len(r.Key), storage.MaxKeyBytes, storage.ErrTooLarge)
	}
	for i := range r.Headers {
		if err := checkHeaderKey(r.Headers[i].Key); err != nil {
			return err
		}
	}
	return checkRecordBytes(r.Bytes())
}

func checkHeaderKey(k []byte) error {
	if len(k) > storage.MaxHeaderKey {
		return fmt.Errorf("header key of %d bytes, limit %d: %w", len(k), storage.MaxHeaderKey, storage.ErrTooLarge)
	}
	if !utf8.Valid(k) { // the API hands header keys out as text
		return fmt.Errorf("header key is not UTF-8: %w", storage.ErrInvalid)
	}
	return nil
}

func checkRecordBytes(n int) error {
	if n > storage.MaxRecordBytes {
		return fmt.Errorf("record of %d bytes, limit %d: %w", n, storage.MaxRecordBytes, storage.ErrTooLarge)
	}
	return nil
}

const flagKey = 1 << 0

// appendRecord writes r; first is the header's first producer time. The delta is taken modulo 2^64, so any two times have one.
func appendRecord(dst []byte, r *Record, first storage.Time) []byte {
	if r.Key != nil {
		dst = append(dst, flagKey)
		dst = binary.AppendUvarint(dst, uint64(len(r.Key)))
		dst = append(dst, r.Key...)
	} else {
		dst = append(dst, 0)
	}
	dst = binary.AppendUvarint(dst, uint64(len(r.Value)))
	dst = append(dst, r.Value...)
	dst = binary.AppendUvarint(dst, uint64(len(r.Headers)))
	for i := range r.Headers {
		h := &r.Headers[i]
		dst = binary.AppendUvarint(dst, uint64(len(h.Key)))
		dst = append(dst, h.Key...)
		dst = binary.AppendUvarint(dst, uint64(len(h.Value)))
		dst = append(dst, h.Value...)
	}
	delta := int64(uint64(r.Time) - uint64(first))
	return binary.AppendUvarint(dst, uint64(delta<<1)^uint64(delta>>63)) // zigzag
}

// walker reads the records of an uncompressed payload, front to back. Its errors wrap storage.ErrInvalid or storage.ErrTooLarge:
// the CRC was right, so the builder lied.
type walker struct {
	rest  []byte
	first storage.Time
	// headers collects a record's headers; nil capacity is fine. Unless keep is set they are only checked.
	headers []RecordHeader
	keep    bool
}

// next reads one record into r; its slices alias the payload, its headers also w.headers, which the next call overwrites.
func (w *walker) next(r *Record) error {
	if len(w.rest) == 0 {
		return fmt.Errorf("batch payload ends before its last record: %w", storage.ErrInvalid)
	}
	flags := w.rest[0]
	if flags&^byte(flagKey) != 0 {
		return fmt.Errorf("record flags %#x: %w", flags, storage.ErrInvalid)
	}
	w.rest = w.rest[1:]
	r.Key, r.Headers = nil, nil
	var err error
	if flags&flagKey != 0 {
		if r.Key, err = w.bytes(); err != nil {
			return err
		}
		if len(r.Key) > storage.MaxKeyBytes {
			return fmt.Errorf("record key of %d bytes, limit %d: %w", len(r.Key), storage.MaxKeyBytes, storage.ErrTooLarge)
		}
	}
	if r.Value, err = w.bytes(); err != nil {
		return err
	}
	size := len(r.Key) + len(r.Value)
	n, ok := w.uvarint()
	if !ok {
		return errVarint()
	}
	if n > 0 {
		more, err := w.readHeaders(r, n)
		if err != nil {
			return err
		}
		size += more
	}
	if size > storage.MaxRecordBytes {
		return checkRecordBytes(size)
	}
	z, ok := w.uvarint()
	if !ok {
		return errVarint()
	}
	r.Time = storage.Time(uint64(w.first) + uint64(int64(z>>1)^-int64(z&1)))
	return nil
}

func (w *walker) readHeaders(r *Record, n uint64) (size int, err error) {
	if n > storage.MaxHeaders {
		return 0, fmt.Errorf("record with %d headers, limit %d: %w", n, storage.MaxHeaders, storage.ErrTooLarge)
	}
	w.headers = w.headers[:0]
	for range n {
		var h RecordHeader
		if h.Key, err = w.bytes(); err != nil {
			return 0, err
		}
		if err = checkHeaderKey(h.Key); err != nil {
			return 0, err
		}
		if h.Value, err = w.bytes(); err != nil {
			return 0, err
		}
		size += len(h.Key) + len(h.Value)
		if w.keep {
			w.headers = append(w.headers, h)
		}
	}
	if w.keep {
		r.Headers = w.headers
	}
	return size, nil
}

// bytes reads a length and as many bytes. What it returns is never nil and has no spare capacity.
func (w *walker) bytes() ([]byte, error) {
	n, ok := w.uvarint()
	if !ok {
		return nil, errVarint()
	}
	if n > uint64(len(w.rest)) {
		return nil, fmt.Errorf("record field of %d bytes, %d are left: %w", n, len(w.rest), storage.ErrInvalid)
	}
	b := w.rest[:n:n]
	w.rest = w.rest[n:]
	return b, nil
}

// uvarint reads a varint and takes only the shortest form of a number, so that one record has one encoding.
func (w *walker) uvarint() (uint64, bool) {
	if len(w.rest) > 0 && w.rest[0] < 0x80 {
		v := uint64(w.rest[0])
		w.rest = w.rest[1:]
		return v, true
	}
	v, n := binary.Uvarint(w.rest)
	if n <= 0 || w.rest[n-1] == 0 { // n > 1 here: a last byte of 0 adds nothing
		return 0, false
	}
	w.rest = w.rest[n:]
	return v, true
}

func errVarint() error {
	return fmt.Errorf("record: cut off or over-long number: %w", storage.ErrInvalid)
}

// end is called after the last record.
func (w *walker) end() error {
	if len(w.rest) != 0 {
		return fmt.Errorf("batch payload has %d bytes after its last record: %w", len(w.rest), storage.ErrInvalid)
	}
	return nil
}
