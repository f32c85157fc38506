package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"connectrpc.com/connect/v2"
	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

// version is set by the Makefile.
var version = "devel"

// Exit codes, frozen.
const (
	exitOK          = 0
	exitOther       = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitDenied      = 4
	exitConflict    = 5
	exitUnavailable = 6
	exitPartly      = 7
	exitCheck       = 8
	exitFolder      = 78
)

// streams are the command's standard streams: data goes to out, all else to err.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// usageError is a fault of the command line.
type usageError struct{ error }

// Unwrap gives the cause.
func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// Outcomes that only the command line knows.
var (
	errPartly = errors.New("partly done")
	errCheck  = errors.New("check failed")
)

// exitCode is the frozen meaning of an error.
func exitCode(err error) int {
	var use usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &use):
		return exitUsage
	case errors.Is(err, storage.ErrFolderRefused), errors.Is(err, storage.ErrNewerFormat):
		return exitFolder
	case errors.Is(err, errPartly):
		return exitPartly
	case errors.Is(err, errCheck):
		return exitCheck
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, storage.ErrTopicNotFound):
		return exitNotFound
	case errors.Is(err, storage.ErrInvalid):
		return exitUsage
	case errors.Is(err, broker.ErrPortInUse):
		return exitOther
	}
	switch connect.CodeOf(err) {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return exitUsage
	case connect.CodeNotFound:
		return exitNotFound
	case connect.CodePermissionDenied, connect.CodeUnauthenticated:
		return exitDenied
	case connect.CodeAlreadyExists, connect.CodeFailedPrecondition, connect.CodeAborted:
		return exitConflict
	case connect.CodeUnavailable, connect.CodeResourceExhausted, connect.CodeDeadlineExceeded:
		return exitUnavailable
	}
	return exitOther
}

// run carries out one command line and returns its exit code.
func run(ctx context.Context, args []string, std streams) int {
	root := newRoot(std)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(std.err, "malachi: "+err.Error())
	}
	return exitCode(err)
}

func newRoot(std streams) *cobra.Command {
	root := &cobra.Command{
		Use:           "malachi",
		Short:         "A log service: topics of ordered records, durable when acknowledged",
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version,
	}
	root.SetIn(std.in)
	root.SetOut(std.out)
	root.SetErr(std.err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newDev(std))
	return root
}
