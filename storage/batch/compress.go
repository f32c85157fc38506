package batch

import (
	"fmt"
	"slices"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"github.com/malachilog/malachi/storage"
)

// maxWindow bounds what a zstd frame may ask for as history: no batch is longer.
const maxWindow = storage.MaxBatchBytes

// The pools are per process: a coder costs some 100 KiB and has no goroutine at concurrency 1, so the collector may drop idle
// ones.
var (
	zstdEncoders = sync.Pool{New: func() any {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
			zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true), zstd.WithWindowSize(1<<20), zstd.WithLowerEncoderMem(true))
		if err != nil {
			panic("batch: zstd encoder options: " + err.Error()) // constants above, no input
		}
		return e
	}}
	zstdDecoders = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxMemory(storage.MaxBatchBytes), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			panic("batch: zstd decoder options: " + err.Error())
		}
		return d
	}}
)

// compressRoom is what compress may need for n bytes, so that a caller reserves once.
func compressRoom(n int, codec Codec) int {
	switch codec {
	case CodecS2:
		return s2.MaxEncodedLen(n)
	case CodecZstd:
		return n + n>>10 + 64 // raw blocks and their headers
	}
	return n
}

// compress appends plain, compressed, to dst; dst may be moved. ok is false, and dst as it was, if the result is not shorter.
func compress(dst, plain []byte, codec Codec) (_ []byte, ok bool) {
	at := len(dst)
	switch codec {
	case CodecS2:
		dst = slices.Grow(dst, compressRoom(len(plain), codec))
		out := s2.Encode(dst[at:cap(dst)], plain)
		dst = dst[:at+len(out)] // s2 wrote into dst: the room was enough
	case CodecZstd:
		e := zstdEncoders.Get().(*zstd.Encoder)
		dst = e.EncodeAll(plain, slices.Grow(dst, compressRoom(len(plain), codec)))
		zstdEncoders.Put(e)
	default:
		return dst, false
	}
	if len(dst)-at >= len(plain) {
		return dst[:at], false
	}
	return dst, true
}

// decompress writes the payload's plain bytes into buf, which has the declared length, and fails unless they fill it exactly. It
// takes no memory beyond buf but a pooled decoder's own tables, and, when a frame lies about its length, less than twice buf for
// the moment it takes to see that.
func decompress(buf, payload []byte, codec Codec) error {
	switch codec {
	case CodecS2:
		n, err := s2.DecodedLen(payload)
		if err != nil {
			return fmt.Errorf("batch payload is not s2: %w", storage.ErrInvalid)
		}
		if n != len(buf) {
			return fmt.Errorf("batch payload of %d bytes uncompressed says %d: %w", n, len(buf), storage.ErrInvalid)
		}
		if _, err := s2.Decode(buf, payload); err != nil {
			return fmt.Errorf("batch payload is not s2: %w", storage.ErrInvalid)
		}
		return nil
	case CodecZstd:
		if err := checkFrame(payload, len(buf)); err != nil {
			return err
		}
		d := zstdDecoders.Get().(*zstd.Decoder)
		out, err := d.DecodeAll(payload, buf[:0:len(buf)]) // the capacity is the limit
		zstdDecoders.Put(d)
		if err != nil {
			return fmt.Errorf("batch payload is not zstd of %d bytes: %w: %w", len(buf), storage.ErrInvalid, err)
		}
		if len(out) != len(buf) {
			return fmt.Errorf("batch payload of %d bytes uncompressed says %d: %w", len(out), len(buf), storage.ErrInvalid)
		}
		if len(buf) > 0 && &out[0] != &buf[0] { // never seen under the capacity limit, but buf would hold rubbish
			copy(buf, out)
		}
		return nil
	}
	return fmt.Errorf("batch codec %d: %w", uint8(codec), ErrUnknownCodec)
}

// checkFrame demands exactly one zstd frame that says it holds want bytes, before anything is decompressed.
func checkFrame(p []byte, want int) error {
	bad := func(what string) error { return fmt.Errorf("batch payload: zstd %s: %w", what, storage.ErrInvalid) }
	var f zstd.Header
	rest, err := f.DecodeAndStrip(p)
	switch {
	case err != nil || f.Skippable:
		return bad("frame header is missing")
	case f.DictionaryID != 0:
		return bad("frame needs a dictionary")
	case !f.HasFCS || f.FrameContentSize != uint64(want):
		return bad("frame does not say the batch's uncompressed length")
	}
	for last := false; !last; {
		if len(rest) < 3 {
			return bad("frame is cut off")
		}
		head := uint32(rest[0]) | uint32(rest[1])<<8 | uint32(rest[2])<<16
		last = head&1 != 0
		size := int(head >> 3)
		if head>>1&3 == 1 { // RLE: one byte, repeated
			size = 1
		}
		if size > len(rest)-3 {
			return bad("block is cut off")
		}
		rest = rest[3+size:]
	}
	if f.HasCheckSum {
		if len(rest) < 4 {
			return bad("frame is cut off")
		}
		rest = rest[4:]
	}
	if len(rest) != 0 {
		return bad("frame is followed by more")
	}
	return nil
}

// plainBuffers holds buffers for payloads that are looked at and forgotten.
var plainBuffers = sync.Pool{New: func() any { return new([]byte) }}

// plainPayload gives the uncompressed payload of a verified batch. It aliases b for CodecNone, else a pooled buffer; release, if
// not nil, is called when the caller has done with it.
func plainPayload(h *Header, b []byte) (plain []byte, release *[]byte, err error) {
	payload := b[HeaderSize:h.Size()]
	if h.Codec == CodecNone {
		return payload, nil, nil
	}
	buf := plainBuffers.Get().(*[]byte)
	if cap(*buf) < int(h.PlainBytes) {
		*buf = make([]byte, h.PlainBytes)
	}
	plain = (*buf)[:h.PlainBytes]
	if err := decompress(plain, payload, h.Codec); err != nil {
		plainBuffers.Put(buf)
		return nil, nil, err
	}
	return plain, buf, nil
}

func releasePlain(buf *[]byte) {
	if buf != nil {
		plainBuffers.Put(buf)
	}
}
