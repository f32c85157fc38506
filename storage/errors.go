package storage

import "errors"

// Errors that cross package boundaries. They are compared with errors.Is; services/rpc maps each to one Connect code and Reason.
var (
	// ErrCorrupt: bytes do not verify (magic, version, length, CRC, digest). Nothing of them may be used.
	ErrCorrupt = errors.New("corrupt data")
	// ErrNewerFormat: the bytes are of a format version or level that this build does not know. Nothing was changed.
	ErrNewerFormat = errors.New("data written by a newer version")
	// ErrTooLarge: a limit of this page would be exceeded. The wrapping text names the limit.
	ErrTooLarge = errors.New("limit exceeded")
	// ErrInvalid: an argument or a byte string from outside is not of the form it must have.
	ErrInvalid = errors.New("invalid argument")

	// ErrFenced: the segment's replica is fenced; it takes no append again, ever.
	ErrFenced = errors.New("segment is fenced")
	// ErrSealed: the segment is sealed.
	ErrSealed = errors.New("segment is sealed")
	// ErrUnknownSegment: this replica was never told to open the segment, or has dropped it.
	ErrUnknownSegment = errors.New("segment is not here")
	// ErrGap: an append that starts beyond the replica's own end.
	ErrGap = errors.New("append starts beyond the end")
	// ErrStorageFailed: a write or sync of the data directory has failed; it takes no append and casts no vote until cleared.
	ErrStorageFailed = errors.New("storage has failed")
	// ErrDamaged: the replica knows of damage in this segment; it neither votes nor is a source.
	ErrDamaged = errors.New("replica is damaged")
	// ErrDiskFull: less than the reserve is free. Retryable.
	ErrDiskFull = errors.New("disk is full")
	// ErrOverloaded: a queue or the journal is at its bound. Retryable.
	ErrOverloaded = errors.New("overloaded")
	// ErrStaleBoot: the segment was opened under another boot of this process; it needs a pass.
	ErrStaleBoot = errors.New("segment was opened before the restart")
	// ErrStaleRoute: the topic, range or segment is not served here (any more); the route must be looked up again. Retryable.
	ErrStaleRoute = errors.New("stale route")
	// ErrUnavailable: a shard, replica or range cannot answer now; the outcome is that nothing was done. Retryable.
	ErrUnavailable = errors.New("unavailable")
	// ErrOutcomeUnknown: the append was queued and its fate is not known. It may be in the log.
	ErrOutcomeUnknown = errors.New("outcome unknown")
	// ErrBeyondEnd: a cursor or read lies beyond the end.
	ErrBeyondEnd = errors.New("beyond the end")
	// ErrClosed: the object was closed.
	ErrClosed = errors.New("closed")

	// ErrTopicNotFound: no topic of that name or uid.
	ErrTopicNotFound = errors.New("topic not found")
	// ErrTopicExists: the name is taken by a topic with other settings or another creation nonce.
	ErrTopicExists = errors.New("topic exists")
	// ErrConflict: an expected version or state was not met.
	ErrConflict = errors.New("conflict")

	// ErrFolderRefused: the data directory can't be used by this process: newer format, other cluster, in use, or a clone. Exit 78.
	ErrFolderRefused = errors.New("data directory refused")
)
