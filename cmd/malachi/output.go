package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/yaml"
)

// choice is a flag with a fixed set of values.
type choice struct {
	value string
	of    []string
}

func (c *choice) String() string { return c.value }
func (c *choice) Type() string   { return strings.Join(c.of, "|") }

// Set refuses what is not one of the values.
func (c *choice) Set(s string) error {
	if !slices.Contains(c.of, s) {
		return fmt.Errorf("want %s", strings.Join(c.of, ", "))
	}
	c.value = s
	return nil
}

// outputFlag adds -o. The first value is the default.
func outputFlag(cmd *cobra.Command, usage string, of ...string) *choice {
	c := &choice{of[0], of}
	cmd.Flags().VarP(c, "output", "o", usage)
	return c
}

// listFlag is the -o of everything that shows a message.
func listFlag(cmd *cobra.Command) *choice {
	return outputFlag(cmd, "table for people; json is the API's response message, yaml the same", "table", "json", "yaml")
}

// show writes a response message.
func show(w io.Writer, format string, m proto.Message, table func(row func(cells ...any))) error {
	if format == "table" {
		return showTable(w, table)
	}
	b, err := protojson.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode response: %w", err)
	}
	return showJSON(w, format, b)
}

// showJSON writes a JSON text as json or yaml.
func showJSON(w io.Writer, format string, b []byte) (err error) {
	var out bytes.Buffer
	if format == "yaml" {
		if b, err = yaml.JSONToYAML(b); err == nil {
			out.Write(b)
		}
	} else if err = json.Indent(&out, b, "", "  "); err == nil { // protojson's own spaces differ from run to run
		out.WriteByte('\n')
	}
	if err != nil {
		return fmt.Errorf("encode response: %w", err)
	}
	if _, err := w.Write(out.Bytes()); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

func showTable(w io.Writer, table func(row func(cells ...any))) error {
	out := bufio.NewWriter(w)
	tw := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	table(func(cells ...any) {
		text := make([]string, len(cells))
		for i, c := range cells {
			text[i] = cell(c)
		}
		fmt.Fprintln(tw, strings.TrimRight(strings.Join(text, "\t"), "\t")) // its error comes with Flush
	})
	err := tw.Flush()
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

// cell is a value as a table shows it: "-" for what is not there, and nothing that could move a terminal's cursor.
func cell(v any) string {
	s := ""
	switch v := v.(type) {
	case *timestamppb.Timestamp:
		if v != nil {
			s = v.AsTime().Format(time.RFC3339)
		}
	case *uint64:
		if v != nil {
			s = fmt.Sprint(*v)
		}
	case map[string]string:
		s = labelText(v)
	default:
		s = fmt.Sprint(v)
	}
	if s == "" {
		return "-"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
}

func labelText(labels map[string]string) string {
	parts := make([]string, 0, len(labels))
	for k, v := range labels {
		parts = append(parts, k+"="+v)
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

// confirm asks before something that has no way back.
func confirm(std streams, yes bool, question string) error {
	if yes {
		return nil
	}
	if !isTerminal(std.in) {
		return usage("there is no terminal to ask on: pass --yes if you mean it")
	}
	fmt.Fprintf(std.err, "%s [y/N] ", question)
	line, err := bufio.NewReader(io.LimitReader(std.in, 64)).ReadString('\n')
	if err != nil && line == "" {
		fmt.Fprintln(std.err)
	}
	if answer := strings.ToLower(strings.TrimSpace(line)); answer != "y" && answer != "yes" {
		return fmt.Errorf("not confirmed: nothing was done")
	}
	return nil
}

// mustConfirm refuses early what confirm could not ask.
func mustConfirm(std streams, yes bool) error {
	if yes || isTerminal(std.in) {
		return nil
	}
	return confirm(std, yes, "")
}
