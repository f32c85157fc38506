// Command malachi is the broker and its command line.
//
// main owns the signals: the first SIGINT or SIGTERM ends the command's context, so that it can say what it has done; the second ends the
// process. Nothing here survives a crash; what must is the broker's.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], streams{in: os.Stdin, out: os.Stdout, err: os.Stderr}))
}
