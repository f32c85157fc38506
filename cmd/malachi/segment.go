package main

import (
	"context"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/client"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/storage"
)

func newSegment(std streams) *cobra.Command {
	return newGroup("segment", "List segments; dump, verify and mend their files",
		newSegmentList(std), newSegmentDump(std), newSegmentVerify(std), newSegmentRebuild(std))
}

// sliceText is a slice for people.
func sliceText(s *v1.KeySlice) string {
	return storage.Slice{Prefix: s.GetPrefix(), Depth: uint8(min(s.GetDepth(), storage.MaxDepth+1))}.String()
}

// parseSegmentID reads what segment list shows: <topic uid>/<timeline>-<range>/<segment>.
func parseSegmentID(s string) (storage.SegmentID, error) {
	bad := usage("segment %.100q: want an id as malachi segment list shows it", s)
	at := strings.LastIndexByte(s, '/')
	if at < 0 {
		return storage.SegmentID{}, bad
	}
	r, err := storage.ParseRangeID(s[:at])
	if err != nil {
		return storage.SegmentID{}, bad
	}
	seq, err := strconv.ParseUint(s[at+1:], 10, 32)
	id := storage.SegmentID{Range: r, Seq: uint32(seq)}
	if err != nil || id.String() != s {
		return storage.SegmentID{}, bad
	}
	return id, nil
}

func newSegmentList(std streams) *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use:               "list TOPIC",
		ValidArgsFunction: completeTopic,
		Aliases:           []string{"ls"},
		Short:             "List a topic's segments, or those in a data folder",
		Long: "List a topic's segments as the cluster knows them; or, with --data, the segment files in the data folder of a broker that does\n" +
			"not run, of one topic or of all. In a folder a file without a valid footer counts as open, and its end is not known.",
		Example: "  malachi segment list orders\n  malachi segment list --data malachi-data",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && cmd.Flags().Changed("data") {
				return nil
			}
			return oneArg("topic")(cmd, args)
		},
	}
	cmd.Flags().StringVar(&data, "data", "", "look at the files in this data `FOLDER`, without a server")
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var all *v1.ListSegmentsResponse
		var err error
		if cmd.Flags().Changed("data") {
			if cmd.Flags().Changed("server") {
				return usage("--data and --server exclude each other")
			}
			all, err = listFolder(data, strings.Join(args, ""))
		} else {
			all, err = listServer(cmd, args[0])
		}
		if err != nil {
			return err
		}
		return show(std.out, out.value, all, func(row func(...any)) {
			row("SEGMENT", "STATE", "BASE", "END", "BYTES", "CREATED", "SEALED", "REASON", "DIGEST")
			for _, g := range all.GetSegments() {
				row(g.GetId(), g.GetState(), g.GetBase(), g.End, g.Bytes, g.GetCreateTime(), g.GetSealTime(), g.GetSealReason(), g.GetDigest())
			}
		})
	}
	return cmd
}

func listServer(cmd *cobra.Command, topic string) (*v1.ListSegmentsResponse, error) {
	s, err := openSession(cmd, client.Config{})
	if err != nil {
		return nil, err
	}
	defer s.quit()
	all, page := &v1.ListSegmentsResponse{}, &v1.PageRequest{PageSize: listPage}
	for {
		var resp *v1.ListSegmentsResponse
		err := s.admin(cmd.Context(), "list segments", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.ListSegments(ctx, &v1.ListSegmentsRequest{Topic: topic, Page: page})
			return err
		})
		if err != nil {
			return nil, err
		}
		all.Segments = append(all.Segments, resp.GetSegments()...)
		if page.PageToken = resp.GetNextPageToken(); page.PageToken == "" {
			return all, nil
		}
	}
}
