package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"connectrpc.com/connect/v2"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/storage"
)

const (
	// forwardBytes is how much one request to a primary carries, unless a single batch is larger.
	forwardBytes = 4 << 20
	// forwardFlight is how many requests to one primary are on their way at once. They end when a quorum has what they brought.
	forwardFlight = 8
	// forwardBound bounds the bytes that wait for one primary or are on their way there.
	forwardBound = 64 << 20
)

// forwarded is a batch on its way to the primary of its segment.
type forwarded struct {
	id   storage.SegmentID
	b    []byte
	done func(Appended, error)
}

// bringer sends a frontend's batches to one primary: what waits goes out together, in order, a few requests at a time.
type bringer struct {
	s  *Service
	to storage.BrokerID

	mu      sync.Mutex
	queue   []forwarded
	bytes   int64 // queued and on their way
	flights int
	number  uint64
}

// forward hands a batch to the primary on another broker. The rules of Append hold; done is called on another goroutine, also when the batch
// was refused there: then the error is of those that Append returns.
func (s *Service) forward(to storage.BrokerID, id storage.SegmentID, b []byte, done func(Appended, error)) error {
	s.mu.Lock()
	br := s.bringers[to]
	if br == nil {
		br = &bringer{s: s, to: to}
		s.bringers[to] = br
	}
	s.mu.Unlock()
	br.mu.Lock()
	defer br.mu.Unlock()
	if br.bytes > 0 && br.bytes+int64(len(b)) > forwardBound {
		return fmt.Errorf("%d bytes wait for broker %s: %w", br.bytes, to, storage.ErrOverloaded)
	}
	if br.flights < forwardFlight {
		if !s.work.start(br.fly) {
			return storage.ErrClosed
		}
		br.flights++
	}
	br.queue = append(br.queue, forwarded{id, b, done})
	br.bytes += int64(len(b))
	return nil
}

// fly sends what waits until nothing does.
func (br *bringer) fly(ctx context.Context) {
	for {
		br.mu.Lock()
		taken, size := br.take()
		if len(taken) == 0 {
			br.flights--
			br.mu.Unlock()
			return
		}
		br.number++
		number := br.number
		br.mu.Unlock()
		br.send(ctx, number, taken)
		br.mu.Lock()
		br.bytes -= size
		br.mu.Unlock()
	}
}

func (br *bringer) take() (taken []forwarded, size int64) {
	n := 0
	for n < len(br.queue) && (n == 0 || size+int64(len(br.queue[n].b)) <= forwardBytes) {
		size += int64(len(br.queue[n].b))
		n++
	}
	taken, br.queue = br.queue[:n:n], br.queue[n:]
	return taken, size
}

func (br *bringer) send(ctx context.Context, number uint64, batches []forwarded) {
	req := &intrav1.ForwardRequest{From: uint64(br.s.cfg.Self), Boot: uint64(br.s.cfg.Boot), Number: number}
	for _, f := range batches {
		req.Batches = append(req.Batches, &intrav1.ForwardedBatch{Segment: SegmentKey(f.id), Batch: f.b})
	}
	ctx, cancel := context.WithTimeout(ctx, br.s.cfg.ProduceDeadline+turnWait)
	defer cancel()
	client, err := br.s.deps.Peers.Client(br.to)
	var res *intrav1.ForwardResponse
	if err == nil {
		res, err = intrav1connect.NewReplicaServiceClient(client).Forward(ctx, req)
	}
	if err == nil && len(res.GetAnswers()) != len(batches) {
		err = fmt.Errorf("%d answers to %d batches", len(res.GetAnswers()), len(batches))
	}
	if err != nil {
		told := br.fate(ctx, err)
		for _, f := range batches {
			br.s.suspect(f.id)
			f.done(Appended{}, told)
		}
		return
	}
	for i, f := range batches {
		a := res.GetAnswers()[i]
		f.done(Appended{Base: storage.Offset(a.GetBase()), End: storage.End(a.GetEnd()), AppendTime: storage.Time(a.GetAppendTime())},
			rpc.FromPeer(br.to, a.GetError()))
	}
}

// fate says what a failed request means for what it carried: never sent, nothing was appended; else nobody knows.
func (br *bringer) fate(ctx context.Context, err error) error {
	var dial *net.OpError
	var ce *connect.Error
	starting := errors.As(err, &ce) && ce.Code() == connect.CodeUnimplemented // it is not registered yet, and serves nothing
	if starting || errors.Is(err, storage.ErrUnavailable) || errors.As(err, &dial) && dial.Op == "dial" {
		return fmt.Errorf("broker %s, the primary, cannot be reached: %w", br.to, storage.ErrStaleRoute)
	}
	return fmt.Errorf("%w: %w", storage.ErrOutcomeUnknown, rpc.PeerCallError(ctx, br.to, err))
}
