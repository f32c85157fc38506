package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// version is set by the Makefile.
var version = "devel"

// streams are the command's standard streams: data goes to out, all else to err.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// isTerminal reports whether a stream is a person's terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}

// run carries out one command line and returns its exit code.
func run(ctx context.Context, args []string, std streams) int {
	root := newRoot(std)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil {
		say(std.err, "malachi: %s", message(err))
	}
	return exitCode(err)
}

// say writes one line for people. That it can't be written is no reason to fail: the exit code says the same.
func say(w io.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(w, format+"\n", args...)
}

func newRoot(std streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "malachi",
		Short: "A log service: topics of ordered records, durable when acknowledged",
		Long: "Malachi is a log service: topics of ordered records, durable when acknowledged.\n\n" +
			"Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 other, 2 usage, 3 not found, 4 denied, 5 conflict,\n" +
			"6 unavailable, 7 partly done, 8 check failed, 78 data folder refused.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version,
		Args:          subcommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(std.in)
	root.SetOut(std.out)
	root.SetErr(std.err)
	root.SetFlagErrorFunc(flagError)
	root.PersistentFlags().String("server", "", "base URL or host:port of a broker (default $MALACHI_SERVER, else "+defaultServer+")")
	root.AddCommand(newDev(std), newServer(std), newTopic(std), newProduce(std), newConsume(std), newSegment(std), newPolicy(std), newCluster(std), newBroker(std), newRange(std), newBench(std), newVersion(std))
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		switch c.Name() {
		case "completion":
			c.Args, c.RunE = subcommand, needsSubcommand
		case "help":
			c.Args = helpTopic
		}
	}
	return root
}

// helpTopic refuses words that are no command.
func helpTopic(cmd *cobra.Command, args []string) error {
	found, rest, err := cmd.Root().Find(args)
	if err == nil && len(rest) == 0 {
		return nil
	}
	if len(rest) == 0 {
		rest = args
	}
	return subcommand(found, rest)
}

// newGroup is a command that only holds others.
func newGroup(use, short string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: subcommand, RunE: needsSubcommand}
	cmd.AddCommand(commands...)
	return cmd
}

func needsSubcommand(cmd *cobra.Command, _ []string) error {
	return usage("%s needs a command: %s", cmd.CommandPath(), strings.Join(commandNames(cmd), ", "))
}

// subcommand refuses a word that is no command, and names the nearest one.
func subcommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	names := commandNames(cmd)
	return usage("%s has no command %q%s", cmd.CommandPath(), args[0], didYouMean(args[0], names, "it has "+strings.Join(names, ", ")))
}

func commandNames(cmd *cobra.Command) (names []string) {
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	return names
}

// flagError is the error of a flag that does not exist or does not parse.
func flagError(cmd *cobra.Command, err error) error {
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return usageError{err}
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
	name := unknown.GetSpecifiedName()
	if len(name) == 1 { // nearness means nothing for one letter
		return usage("%s has no flag -%s; see %s --help", cmd.CommandPath(), name, cmd.CommandPath())
	}
	return usage("%s has no flag --%s%s", cmd.CommandPath(), name, didYouMean("--"+name, names, "see "+cmd.CommandPath()+" --help"))
}

// noArgs refuses words that a command does not take.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage("%q is not expected here", args[0])
	}
	return nil
}

// oneArg wants exactly one word.
func oneArg(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0:
			return usage("%s: name the %s: %s", cmd.CommandPath(), what, cmd.UseLine())
		case len(args) > 1:
			return usage("%s: %q is not expected after the %s %q", cmd.CommandPath(), args[1], what, args[0])
		}
		return nil
	}
}
