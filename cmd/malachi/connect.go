package main

import (
	"context"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

const (
	defaultServer = "http://127.0.0.1:4040"
	defaultPort   = "4040"
	// callTimeout bounds one administrative call.
	callTimeout = 15 * time.Second
)

// serverOf gives the base URL of the broker that a command talks to: --server, else MALACHI_SERVER, else the default.
func serverOf(cmd *cobra.Command) (string, error) {
	if f := cmd.Flags().Lookup("server"); f != nil && f.Changed {
		return parseServer("--server", f.Value.String())
	}
	if s := os.Getenv("MALACHI_SERVER"); s != "" {
		return parseServer("MALACHI_SERVER", s)
	}
	return defaultServer, nil
}

// parseServer takes a base URL, host:port, :port (this machine) or a host.
func parseServer(source, s string) (string, error) {
	bad := func() (string, error) {
		return "", usage("%s %.200q: want http://host:port, https://host:port or host:port", source, s)
	}
	full := s
	if !strings.Contains(s, "://") {
		if strings.HasPrefix(s, ":") && !strings.HasPrefix(s, "::") {
			full = "127.0.0.1" + s
		}
		if _, _, err := net.SplitHostPort(full); err != nil {
			full = net.JoinHostPort(strings.Trim(full, "[]"), defaultPort)
		}
		full = "http://" + full
	}
	u, err := url.Parse(full)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" ||
		u.Fragment != "" || u.User != nil {
		return bad()
	}
	return u.Scheme + "://" + u.Host, nil
}

// session is a client of the broker that the command line names.
type session struct {
	*client.Client
	server string
}

// open makes the session; cfg.Servers is filled in. Close it.
func openSession(cmd *cobra.Command, cfg client.Config) (*session, error) {
	server, err := serverOf(cmd)
	if err != nil {
		return nil, err
	}
	cfg.Servers = []string{server}
	c, err := client.New(cfg)
	if err != nil {
		return nil, usageError{err}
	}
	return &session{c, server}, nil
}

// admin carries out one administrative call.
func admin(cmd *cobra.Command, op string, call func(context.Context, malachiv1connect.AdminServiceClient) error) error {
	s, err := openSession(cmd, client.Config{})
	if err != nil {
		return err
	}
	defer s.quit()
	return s.admin(cmd.Context(), op, call)
}

func (s *session) admin(ctx context.Context, op string, call func(context.Context, malachiv1connect.AdminServiceClient) error) error {
	bounded, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return failed(ctx, s.server, op, call(bounded, s.Admin()))
}

// quit closes a session that has nothing under way.
func (s *session) quit() {
	_ = s.Close(context.Background()) // it returns the error of its context, which has none
}

// check finds out at once whether the broker answers and has the topic: the client itself would go on trying for minutes. What only
// the call itself can tell is left to it.
func (s *session) check(ctx context.Context, topic string) error {
	err := s.admin(ctx, "find topic", func(ctx context.Context, a malachiv1connect.AdminServiceClient) error {
		_, err := a.DescribeTopic(ctx, &v1.DescribeTopicRequest{Name: topic})
		return err
	})
	if exitCode(err) == exitDenied {
		return nil
	}
	return err
}

// completeTopic offers the names of topics to the shell. Without a broker there are none.
func completeTopic(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	var names []cobra.Completion
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	err := admin(cmd, "list topics", func(ctx context.Context, a malachiv1connect.AdminServiceClient) error {
		resp, err := a.ListTopics(ctx, &v1.ListTopicsRequest{Prefix: word})
		for _, t := range resp.GetTopics() {
			names = append(names, t.GetName())
		}
		return err
	})
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
