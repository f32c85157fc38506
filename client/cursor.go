package client

import (
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	malachiv1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/storage"
)

// Start is where a consumer begins. The zero value is Earliest.
type Start struct {
	position *malachiv1.StartPosition // nil: the token
	token    string
}

// Earliest begins at the oldest record that is still there.
func Earliest() Start { return Start{} }

// Latest begins after the newest record of the moment when the consumer first reads.
func Latest() Start {
	return Start{position: &malachiv1.StartPosition{At: &malachiv1.StartPosition_Latest{Latest: true}}}
}

// At begins with the first record that a broker took at or after t. A time in the future is Latest.
func At(t time.Time) Start {
	return Start{position: &malachiv1.StartPosition{At: &malachiv1.StartPosition_Time{Time: timestamppb.New(t)}}}
}

// Cursor begins at a place that Consumer.Cursor or a server gave. An empty one is Earliest.
func Cursor(token string) Start { return Start{token: token} }

// The server knows the places between pages. Within a page the consumer's place is the page's own cursor and, for each range that
// it has had records of since, the offset up to which: a second reading of the page may cut it otherwise (more records have come,
// some are gone), so a mere count would lose or repeat some. The token is the server's cursor, and then, if any, "~" and a list
// of prefix.depth.offset, each naming a range by its slice. Only the SDK reads the second part; the server's cursors have no "~".
const (
	tokenSep    = "~"
	maxProgress = 2048 // ranges of a topic
)

// progress is, per range, the first offset not delivered.
type progress map[storage.Slice]storage.Offset

// formatToken writes a cursor with what was delivered beyond it.
func formatToken(cursor string, done progress) string {
	if len(done) == 0 {
		return cursor
	}
	parts := make([]string, 0, len(done))
	for s, o := range done {
		parts = append(parts, fmt.Sprintf("%d.%d.%d", s.Prefix, s.Depth, o))
	}
	slices.Sort(parts)
	token := cursor + tokenSep + strings.Join(parts, ",")
	return token + tokenSep + tokenSum(token)
}

// tokenSum guards a token against slips of a hand; it is no proof.
func tokenSum(token string) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(token))) }

// parseToken reads what formatToken wrote. Errors wrap storage.ErrInvalid or storage.ErrTooLarge.
func parseToken(token string) (cursor string, done progress, err error) {
	cursor, list, found := strings.Cut(token, tokenSep)
	if len(cursor) > storage.MaxCursorBytes {
		return "", nil, fmt.Errorf("cursor of %d bytes, limit %d: %w", len(cursor), storage.MaxCursorBytes, storage.ErrTooLarge)
	}
	if !found {
		return cursor, nil, nil
	}
	list, sum, _ := strings.Cut(list, tokenSep)
	if sum != tokenSum(cursor+tokenSep+list) {
		return "", nil, fmt.Errorf("cursor: it is not as it was given out (checksum): %w", storage.ErrInvalid)
	}
	if n := strings.Count(list, ",") + 1; n > maxProgress {
		return "", nil, fmt.Errorf("cursor names %d ranges, limit %d: %w", n, maxProgress, storage.ErrTooLarge)
	}
	done = progress{}
	for part := range strings.SplitSeq(list, ",") {
		f := strings.SplitN(part, ".", 4)
		if len(f) != 3 {
			return "", nil, fmt.Errorf("cursor: %.60q is not prefix.depth.offset: %w", part, storage.ErrInvalid)
		}
		prefix, err1 := strconv.ParseUint(f[0], 10, 32)
		depth, err2 := strconv.ParseUint(f[1], 10, 8)
		offset, err3 := strconv.ParseUint(f[2], 10, 64)
		s := storage.Slice{Prefix: uint32(prefix), Depth: uint8(depth)}
		if _, twice := done[s]; err1 != nil || err2 != nil || err3 != nil || twice || !s.Valid() {
			return "", nil, fmt.Errorf("cursor: %.60q is not prefix.depth.offset: %w", part, storage.ErrInvalid)
		}
		done[s] = storage.Offset(offset)
	}
	return cursor, done, nil
}
