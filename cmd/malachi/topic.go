package main

import (
	"context"
	"crypto/rand"
	"maps"
	"strings"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

// listPage is how many entries one call of a list asks for.
const listPage = 1000

func newTopic(std streams) *cobra.Command {
	return newGroup("topic", "Create, list, describe, update and delete topics",
		newTopicCreate(std), newTopicList(std), newTopicDescribe(std), newTopicUpdate(std), newTopicDelete(std))
}

// parsePairs reads k=v words.
func parsePairs(flag string, words []string) ([][2]string, error) {
	var out [][2]string
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok || k == "" {
			return nil, usage("--%s %q: want key=value", flag, w)
		}
		out = append(out, [2]string{k, v})
	}
	return out, nil
}

func parseLabels(words []string) (map[string]string, error) {
	pairs, err := parsePairs("label", words)
	if err != nil {
		return nil, err
	}
	labels := map[string]string{}
	for _, p := range pairs {
		if _, twice := labels[p[0]]; twice {
			return nil, usage("--label %s is given twice", p[0])
		}
		labels[p[0]] = p[1]
	}
	return labels, nil
}

func newTopicCreate(std streams) *cobra.Command {
	var (
		ranges  int32
		labels  []string
		protect bool
	)
	cmd := &cobra.Command{
		Use:     "create TOPIC",
		Short:   "Create a topic",
		Example: "  malachi topic create orders --ranges 4 --label team=shop",
		Args:    oneArg("topic"),
	}
	cmd.Flags().Int32Var(&ranges, "ranges", 1, "how many ranges it begins with: a power of two, 1 to 256")
	cmd.Flags().StringArrayVar(&labels, "label", nil, "a label, `key=value`; may be repeated")
	cmd.Flags().BoolVar(&protect, "deletion-protection", false, "refuse to delete the topic until this is taken off")
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		l, err := parseLabels(labels)
		if err != nil {
			return err
		}
		if ranges == 0 { // the API's "not set", which nobody types on purpose
			return usage("--ranges 0: want a power of two, 1 to 256")
		}
		req := &v1.CreateTopicRequest{Name: args[0], InitialRanges: ranges, Labels: l, DeletionProtection: protect, Nonce: rand.Text()}
		var resp *v1.CreateTopicResponse
		err = admin(cmd, "create topic", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.CreateTopic(ctx, req)
			return err
		})
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, topicTable(resp.GetTopic()))
	}
	return cmd
}

// topicTable shows topics, one a row.
func topicTable(topics ...*v1.Topic) func(row func(...any)) {
	return func(row func(...any)) {
		row("NAME", "RANGES", "CREATED", "PROTECTED", "VERSION", "LABELS", "UID")
		for _, t := range topics {
			row(t.GetName(), t.GetInitialRanges(), t.GetCreateTime(), t.GetDeletionProtection(), t.GetMetaVersion(), t.GetLabels(), t.GetUid())
		}
	}
}

func newTopicList(std streams) *cobra.Command {
	var prefix string
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List topics by name", Args: noArgs}
	cmd.Flags().StringVar(&prefix, "prefix", "", "only topics whose names begin so")
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := openSession(cmd, client.Config{})
		if err != nil {
			return err
		}
		defer s.quit()
		all, page := &v1.ListTopicsResponse{}, &v1.PageRequest{PageSize: listPage}
		for {
			var resp *v1.ListTopicsResponse
			err := s.admin(cmd.Context(), "list topics", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
				resp, err = a.ListTopics(ctx, &v1.ListTopicsRequest{Page: page, Prefix: prefix})
				return err
			})
			if err != nil {
				return err
			}
			all.Topics = append(all.Topics, resp.GetTopics()...)
			if page.PageToken = resp.GetNextPageToken(); page.PageToken == "" {
				return show(std.out, out.value, all, topicTable(all.GetTopics()...))
			}
		}
	}
	return cmd
}

// describe gets a topic.
func (s *session) describe(ctx context.Context, name string) (resp *v1.DescribeTopicResponse, err error) {
	err = s.admin(ctx, "describe topic", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
		resp, err = a.DescribeTopic(ctx, &v1.DescribeTopicRequest{Name: name})
		return err
	})
	return resp, err
}

func newTopicDescribe(std streams) *cobra.Command {
	cmd := &cobra.Command{Use: "describe TOPIC", Aliases: []string{"show"}, Short: "Show a topic and its ranges", Args: oneArg("topic"), ValidArgsFunction: completeTopic}
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		s, err := openSession(cmd, client.Config{})
		if err != nil {
			return err
		}
		defer s.quit()
		resp, err := s.describe(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, func(row func(...any)) {
			topicTable(resp.GetTopic())(row)
			row()
			row("RANGE", "SLICE", "STATE", "START", "COMMITTED", "SEGMENTS", "BLOCKED BY")
			for _, r := range resp.GetRanges() {
				row(r.GetId(), sliceText(r.GetSlice()), r.GetState(), r.GetStart(), r.CommittedEnd, r.GetSegments(), r.GetBlockedBy())
			}
		})
	}
	return cmd
}

func newTopicUpdate(std streams) *cobra.Command {
	var (
		labels, unset []string
		protect       bool
		expect        uint64
	)
	cmd := &cobra.Command{
		Use:               "update TOPIC",
		ValidArgsFunction: completeTopic,
		Short:             "Change a topic's labels or deletion protection",
		Example:           "  malachi topic update orders --label team=shop --unset-label owner --deletion-protection=true",
		Args:              oneArg("topic"),
	}
	fl := cmd.Flags()
	fl.StringArrayVar(&labels, "label", nil, "set a label, `key=value`; other labels stay; may be repeated")
	fl.StringArrayVar(&unset, "unset-label", nil, "remove the label with this `key`; may be repeated")
	fl.BoolVar(&protect, "deletion-protection", false, "true refuses to delete the topic, false allows it")
	fl.Uint64Var(&expect, "expect-version", 0, "change only if the topic's version is this; 0 for any")
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		set, err := parseLabels(labels)
		if err != nil {
			return err
		}
		req := &v1.UpdateTopicRequest{Name: args[0], ExpectMetaVersion: expect}
		if fl.Changed("deletion-protection") {
			req.DeletionProtection = &protect
		}
		if req.DeletionProtection == nil && len(set) == 0 && len(unset) == 0 {
			return usage("say what to change: --label, --unset-label or --deletion-protection")
		}
		s, err := openSession(cmd, client.Config{})
		if err != nil {
			return err
		}
		defer s.quit()
		if len(set) > 0 || len(unset) > 0 {
			if err := s.mergeLabels(cmd.Context(), req, set, unset); err != nil {
				return err
			}
		}
		var resp *v1.UpdateTopicResponse
		err = s.admin(cmd.Context(), "update topic", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.UpdateTopic(ctx, req)
			return err
		})
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, topicTable(resp.GetTopic()))
	}
	return cmd
}

// mergeLabels makes the whole set that the API takes of the topic's labels and the changes, on condition that the topic does not change
// in between.
func (s *session) mergeLabels(ctx context.Context, req *v1.UpdateTopicRequest, set map[string]string, unset []string) error {
	cur, err := s.describe(ctx, req.GetName())
	if err != nil {
		return err
	}
	all := map[string]string{}
	maps.Copy(all, cur.GetTopic().GetLabels())
	for _, k := range unset {
		if _, ok := all[k]; !ok {
			return usage("--unset-label %s: topic %s has no such label", k, req.GetName())
		}
		delete(all, k)
	}
	maps.Copy(all, set)
	req.Labels = &v1.LabelSet{Labels: all}
	if req.GetExpectMetaVersion() == 0 {
		req.ExpectMetaVersion = cur.GetTopic().GetMetaVersion()
	}
	return nil
}

func newTopicDelete(std streams) *cobra.Command {
	var (
		yes    bool
		expect uint64
	)
	cmd := &cobra.Command{
		Use:               "delete TOPIC",
		ValidArgsFunction: completeTopic,
		Short:             "Delete a topic and all its records",
		Long:              "Delete a topic and all its records. There is no way back. It asks first; --yes skips the question, and is needed without a terminal.",
		Args:              oneArg("topic"),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().Uint64Var(&expect, "expect-version", 0, "delete only if the topic's version is this; 0 for any")
	out := outputFlag(cmd, "what to write to stdout: nothing, or the API's response message", "none", "json", "yaml")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := mustConfirm(std, yes); err != nil {
			return err
		}
		s, err := openSession(cmd, client.Config{})
		if err != nil {
			return err
		}
		defer s.quit()
		found, err := s.describe(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		name := found.GetTopic().GetName()
		if err := confirm(std, yes, "Delete topic "+name+" and all its records? There is no way back."); err != nil {
			return err
		}
		// The uid: what is deleted is what was asked about, not a topic made under the name since.
		req := &v1.DeleteTopicRequest{Name: name, ExpectMetaVersion: expect, Uid: found.GetTopic().GetUid()}
		var resp *v1.DeleteTopicResponse
		err = s.admin(cmd.Context(), "delete topic", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.DeleteTopic(ctx, req)
			return err
		})
		if err != nil {
			return err
		}
		say(std.err, "deleted topic %s", name)
		if out.value == "none" {
			return nil
		}
		return show(std.out, out.value, resp, nil)
	}
	return cmd
}
