package batch

import (
	"fmt"

	"github.com/malachilog/malachi/storage"
)

// Decoder reads the records of one batch after another. The zero value is ready. Not safe for concurrent use.
type Decoder struct {
	buf  []byte // decompressed payload, reused
	w    walker
	left uint32
	err  error
}

// Open verifies b (as Verify does) and readies its records for Next. It decompresses, if need be, into a buffer of the decoder's
// own, which it reuses: records of the batch before are invalid then. Whoever wants them to live on uses a new Decoder. The
// decoder reads b until the last record: b must not change.
//
// Memory: nothing for CodecNone, else at most the header's uncompressed length, which is at most storage.MaxBatchBytes. A payload
// that does not decompress to exactly that length is storage.ErrInvalid.
func (d *Decoder) Open(b []byte) (Header, error) {
	d.left, d.err = 0, nil
	h, err := Verify(b)
	if err != nil {
		return Header{}, d.fail(err)
	}
	plain := b[HeaderSize:]
	if h.Codec != CodecNone {
		if cap(d.buf) < int(h.PlainBytes) {
			d.buf = make([]byte, h.PlainBytes)
		}
		plain = d.buf[:h.PlainBytes]
		if err := decompress(plain, b[HeaderSize:], h.Codec); err != nil {
			return Header{}, d.fail(err)
		}
	}
	d.w = walker{rest: plain, first: h.FirstTime, headers: d.w.headers, keep: true}
	d.left = h.Records
	return h, nil
}

func (d *Decoder) fail(err error) error {
	d.err = err
	return err
}

// Next reads the next record into r and reports whether there was one; after false Err says whether the batch was read to its
// end. The record's key and value alias the batch (CodecNone) or the decoder's buffer, read-only, until the next Open; its
// Headers slice is overwritten by the next Next.
func (d *Decoder) Next(r *Record) bool {
	if d.left == 0 {
		return false
	}
	if err := d.w.next(r); err != nil {
		d.left, d.err = 0, err
		return false
	}
	if d.left--; d.left == 0 {
		d.err = d.w.end() // the last record is good; the lie about the length is told after it
	}
	return true
}

// Err is nil, or why the batch could not be read whole: what Open returned, or storage.ErrInvalid or storage.ErrTooLarge from its
// records.
func (d *Decoder) Err() error { return d.err }

// Check is Verify and a look at every record: that the payload decompresses to the declared length, that the records fill it
// exactly and keep their limits, that times and positions are what the header says, and that the slice holds them. It is what a
// batch from outside must pass before it is appended. A batch that passes decodes without error and Split takes it.
//
// It allocates nothing for CodecNone and otherwise uses a pooled buffer of at most storage.MaxBatchBytes. Errors: as Verify;
// storage.ErrInvalid for a lie of the builder, storage.ErrTooLarge for a record beyond its limits.
func Check(b []byte) (Header, error) {
	h, err := Verify(b)
	if err != nil {
		return Header{}, err
	}
	plain, buf, err := plainPayload(&h, b)
	if err != nil {
		return Header{}, err
	}
	defer releasePlain(buf)
	if err := checkRecords(h, plain); err != nil {
		return Header{}, err
	}
	return h, nil
}

func checkRecords(h Header, plain []byte) error {
	var r Record
	w := walker{rest: plain, first: h.FirstTime}
	low, high := ^storage.Position(0), storage.Position(0)
	latest := h.FirstTime
	free := false // has records whose position only the builder knew
	for i := range h.Records {
		if err := w.next(&r); err != nil {
			return fmt.Errorf("record %d: %w", i, err)
		}
		if i == 0 && r.Time != h.FirstTime {
			return fmt.Errorf("first record is not of the batch's first time: %w", storage.ErrInvalid)
		}
		latest = max(latest, r.Time)
		if r.Key == nil && h.Producer.IsZero() {
			free = true
			continue
		}
		p := h.KeylessPosition()
		if r.Key != nil {
			p = storage.PositionOfKey(r.Key)
		}
		low, high = min(low, p), max(high, p)
	}
	if err := w.end(); err != nil {
		return err
	}
	if latest != h.MaxTime {
		return fmt.Errorf("latest record time %d, batch says %d: %w", latest, h.MaxTime, storage.ErrInvalid)
	}
	// Keyless records without a producer id live where the builder put them: then the header may say more than the keys do, not
	// less.
	if exact := low == h.Lowest && high == h.Highest; !exact && (!free || low < h.Lowest || high > h.Highest) {
		return fmt.Errorf("positions of the records are not those that the batch says: %w", storage.ErrInvalid)
	}
	if !h.FitsIn(h.Slice) {
		return fmt.Errorf("positions of the batch lie outside its slice %s: %w", h.Slice, storage.ErrInvalid)
	}
	return nil
}
