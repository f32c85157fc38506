package rangelog

import (
	"context"
	"fmt"

	"github.com/malachilog/malachi/storage"
)

// Rejoin lets a replica of an earlier boot take appends of its primary again, once its file was read and verified: a restarted follower goes on
// where its durable end is. Only for a replica whose primary is another broker: a primary's boot has passed. Rejoining again is no error.
// Errors: storage.ErrUnknownSegment, ErrFenced, ErrSealed, ErrDamaged, ErrStorageFailed, ctx's.
func (s *Store) Rejoin(ctx context.Context, id storage.SegmentID) error {
	if err := s.Failed(); err != nil {
		return fmt.Errorf("rejoin %s: %w", id, err)
	}
	r, err := s.live(id)
	if err != nil {
		return fmt.Errorf("rejoin: %w", err)
	}
	if err := r.takeAdmin(ctx); err != nil {
		return fmt.Errorf("rejoin %s: %w", id, err)
	}
	defer r.giveAdmin()
	if err := s.verifyRestarted(r); err != nil {
		return fmt.Errorf("rejoin %s: %w", id, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.m.Rejoin(); err != nil {
		return fmt.Errorf("rejoin %s: %w", id, err)
	}
	return nil
}
