package controlplane

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lni/dragonboat/v4/logger"
)

// The Raft library has one log for the whole process and panics when it is set a second time, so this is process-wide state by
// necessity: set once, and pointed at the logger of whoever opened a control plane last.
var (
	raftLogOnce sync.Once
	raftLog     atomic.Pointer[slog.Logger]
)

func routeRaftLog(l *slog.Logger) {
	raftLog.Store(l)
	raftLogOnce.Do(func() {
		logger.SetLoggerFactory(func(pkg string) logger.ILogger { return raftLogger(pkg) })
	})
}

// raftLines limits lines of one form to one in repeatAfter. There are as many forms as the library has format strings.
var raftLines limiter

const repeatAfter = 30 * time.Second

type limiter struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func (l *limiter) due(form string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last, ok := l.last[form]; ok && now.Sub(last) < repeatAfter {
		return false
	}
	if l.last == nil {
		l.last = map[string]time.Time{}
	}
	l.last[form] = now
	return true
}

// raftLogger is the log of one package of the library. Warnings and worse pass, at Debug the rest is not even formatted.
type raftLogger string

func (l raftLogger) write(level slog.Level, format string, args []any) {
	out := raftLog.Load()
	switch {
	case l == "transport":
		// A peer that restarts makes a line of each attempt to reach it. None needs a person by itself, and one in a while tells.
		if level = slog.LevelWarn; !raftLines.due(format, time.Now()) {
			level = slog.LevelDebug
		}
	case level == slog.LevelWarn && l.chatty(format):
		level = slog.LevelDebug
	}
	if out == nil || !out.Enabled(context.Background(), level) {
		return
	}
	out.Log(context.Background(), level, fmt.Sprintf(format, args...), "raft_package", string(l))
}

// chatty reports whether a warning is none to a person. Package config warns of our deliberate choices (no TLS on a loopback
// listener, a short election of a group of one), package raft of every step of every election, and others of every tick that a
// busy machine delivers late and of a snapshot that is due while one is written.
func (l raftLogger) chatty(format string) bool {
	return l == "config" || l == "raft" || strings.Contains(format, "LocalTick") || strings.Contains(format, "ignored new snapshot req")
}

// SetLevel does nothing: our logger's level counts.
func (l raftLogger) SetLevel(logger.LogLevel) {}

// Debugf drops the line.
func (l raftLogger) Debugf(string, ...any) {}

// Infof drops the line: the library tells its life story at this level.
func (l raftLogger) Infof(string, ...any) {}

// Warningf passes the line on at Warn.
func (l raftLogger) Warningf(format string, args ...any) { l.write(slog.LevelWarn, format, args) }

// Errorf passes the line on at Error.
func (l raftLogger) Errorf(format string, args ...any) { l.write(slog.LevelError, format, args) }

// Panicf passes the line on at Error and panics, as the library expects: it ends the process on errors of its disk.
func (l raftLogger) Panicf(format string, args ...any) {
	l.write(slog.LevelError, format, args)
	panic(fmt.Sprintf(format, args...))
}
