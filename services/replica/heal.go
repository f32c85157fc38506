package replica

import (
	"context"
	"errors"
	"fmt"
	"io"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/services/controlplane/metadata"
	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/rangelog"
)

// recorded is what the record of a sealed segment says of its copies.
func recorded(seg *metadata.Segment) rangelog.Recorded {
	return rangelog.Recorded{End: seg.End, Bytes: int64(seg.DataBytes), Digest: seg.Digest}
}

// CheckCopy reads the own copy of a sealed segment whole and compares it with the record. See rangelog.Store.CheckCopy.
func (s *Service) CheckCopy(seg *metadata.Segment, pace func(n int) error) error {
	return s.deps.Store.CheckCopy(seg.ID, recorded(seg), pace)
}

// Heal puts a proved copy of a sealed segment on this broker's disk, if there is none: an index that has rotted is built anew from the own
// batches; else the copy comes from the first broker of the set that has an intact one. A broker that does not answer is no proof that its copy is
// gone (INV-R5): then the error is storage.ErrUnavailable, and nothing has changed.
func (s *Service) Heal(ctx context.Context, seg *metadata.Segment) error {
	want := recorded(seg)
	if _, err := s.deps.Store.RebuildIndex(seg.ID); err == nil && s.deps.Store.CheckCopy(seg.ID, want, nil) == nil {
		return nil
	}
	var errs []error
	for _, b := range seg.Replicas {
		if b == s.cfg.Self {
			continue
		}
		r, err := NewRemote(s.deps.Peers, b)
		if err == nil {
			err = s.deps.Store.Install(ctx, seg.ID, want, func(w io.WriterAt) error { return r.copyRaw(ctx, seg.ID, want.Bytes, w) })
		}
		if err == nil {
			s.deps.Logger.Info("copy healed", "segment", seg.ID.String(), "from", b.String(), "bytes", want.Bytes)
			return nil
		}
		if errors.Is(err, storage.ErrDiskFull) || errors.Is(err, storage.ErrStorageFailed) || ctx.Err() != nil {
			return err
		}
		errs = append(errs, fmt.Errorf("from broker %s: %w", b, err))
	}
	return fmt.Errorf("heal %s: no other copy proves intact now: %w: %w", seg.ID, storage.ErrUnavailable, errors.Join(errs...))
}

// copyRaw copies the header and batches of a sealed copy there.
func (r *Remote) copyRaw(ctx context.Context, id storage.SegmentID, bytes int64, w io.WriterAt) error {
	for pos := int64(0); pos < bytes; {
		call, cancel := context.WithTimeout(ctx, readPatience)
		res, err := r.client.ReadRaw(call, &intrav1.ReadRawRequest{Segment: SegmentKey(id), Position: pos, MaxBytes: maxPage})
		cancel()
		if err != nil {
			return r.failed(ctx, err)
		}
		n := int64(len(res.GetData()))
		if res.GetTotal() != bytes || n == 0 || pos+n > bytes {
			return fmt.Errorf("its copy has %d bytes, recorded are %d: %w", res.GetTotal(), bytes, storage.ErrCorrupt)
		}
		if _, err := w.WriteAt(res.GetData(), pos); err != nil {
			return err
		}
		pos += n
	}
	return nil
}
