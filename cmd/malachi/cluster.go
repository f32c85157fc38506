package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"github.com/spf13/cobra"

	intrav1 "github.com/malachilog/malachi/gen/go/malachi/intra/v1"
	"github.com/malachilog/malachi/gen/go/malachi/intra/v1/intrav1connect"
	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
	"github.com/malachilog/malachi/services/rpc"
	"github.com/malachilog/malachi/services/transport"
	"github.com/malachilog/malachi/storage"
)

// initPatience bounds a founding: it asks every seed.
const initPatience = 30 * time.Second

func newCluster(std streams) *cobra.Command {
	return newGroup("cluster", "Found a cluster, show it, raise its level", newClusterInit(std), newClusterStatus(std), newClusterLevel(std))
}

func newClusterInit(std streams) *cobra.Command {
	var (
		files  transport.Files
		ignore bool
	)
	cmd := &cobra.Command{
		Use: "init RPC-ADDRESS", Short: "Have one broker of no cluster found one",
		Long: "Have the broker that listens for other brokers at this address (its rpc port) found a cluster. It must belong to none; it asks its\n" +
			"join addresses first, and refuses if one of them has a cluster or cannot be asked.",
		Example: "  malachi cluster init 127.0.0.1:4042", Args: oneArg("address"),
	}
	cmd.Flags().StringVar(&files.Cert, "tls-cert", "", "certificate to show, a PEM `FILE`")
	cmd.Flags().StringVar(&files.Key, "tls-key", "", "its private key")
	cmd.Flags().StringVar(&files.CA, "tls-ca", "", "authorities that the broker's certificate is verified against")
	cmd.Flags().BoolVar(&ignore, "ignore-unreachable", false, "found although a join address cannot be asked: only if you know that it has no cluster")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		peers := rpc.NewPeers(func(storage.BrokerID) (string, bool) { return "", false }, nil)
		if files != (transport.Files{}) {
			source, err := transport.Open(files, transport.Deps{})
			if err != nil {
				return usageError{err}
			}
			if !source.Mutual() {
				return usage("--tls-ca is needed beside --tls-cert and --tls-key")
			}
			peers = rpc.NewPeers(func(storage.BrokerID) (string, bool) { return "", false }, source.Transport())
		}
		defer peers.Close()
		ctx, cancel := context.WithTimeout(cmd.Context(), initPatience)
		defer cancel()
		res, err := intrav1connect.NewClusterServiceClient(peers.At(args[0])).Init(ctx, &intrav1.InitRequest{IgnoreUnreachable: ignore})
		var ce *connect.Error
		switch {
		case err == nil:
		case errors.As(err, &ce) && ce.IsRemote():
			return fmt.Errorf("found a cluster at %s: %w: %s", args[0], storage.ErrConflict, ce.Message())
		default:
			return fmt.Errorf("found a cluster at %s: no broker answers there: %w: %w", args[0], storage.ErrUnavailable, err)
		}
		say(std.out, "%s", hex.EncodeToString(res.GetClusterId()))
		return nil
	}
	return cmd
}

func newClusterStatus(std streams) *cobra.Command {
	cmd := &cobra.Command{Use: "status", Short: "Show brokers, metadata groups and what they wait for", Args: noArgs}
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		resp, err := clusterStatus(cmd)
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, func(row func(...any)) {
			row("CLUSTER", "LEVEL", "BROKERS", "SHARDS", "VERSION")
			row(resp.GetClusterId(), resp.GetLevel(), len(resp.GetBrokers()), resp.GetVnodes(), resp.GetVersion())
			row("")
			brokerTable(resp.GetBrokers())(row)
			row("")
			row("GROUP", "LEADER", "VOTERS", "NON-VOTING", "APPLIED", "WAITS FOR")
			for _, g := range resp.GetGroups() {
				name := "root"
				if g.GetVnode() >= 0 {
					name = strconv.Itoa(int(g.GetVnode()))
				}
				row(name, g.GetLeader(), strings.Join(g.GetVoters(), ","), strings.Join(g.GetNonVoting(), ","), g.GetApplied(), g.GetWaits())
			}
		})
	}
	return cmd
}

func clusterStatus(cmd *cobra.Command) (resp *v1.GetClusterStatusResponse, err error) {
	err = admin(cmd, "cluster status", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
		resp, err = a.GetClusterStatus(ctx, &v1.GetClusterStatusRequest{})
		return err
	})
	return resp, err
}

func brokerTable(brokers []*v1.Broker) func(row func(...any)) {
	return func(row func(...any)) {
		row("BROKER", "BOOT", "STATE", "THERE", "API", "ATTRIBUTES", "VERSION", "WAITS FOR")
		for _, b := range brokers {
			there := "yes"
			if !b.GetAlive() {
				there = "gone for " + b.GetAbsent().AsDuration().String()
			}
			row(b.GetId(), b.GetBoot(), b.GetAdministrativeState(), there, b.GetAddresses()["api"], b.GetAttributes(), b.GetVersion(), strings.Join(b.GetWaits(), "; "))
		}
	}
}

func newClusterLevel(std streams) *cobra.Command {
	cmd := &cobra.Command{
		Use: "level N", Short: "Raise the level of commands and formats: there is no way back",
		Long: "Raise the level of the cluster's commands and formats. Every broker must understand it, dead ones included; a build that does not is\n" +
			"refused from then on.",
		Args: oneArg("level"),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		n, err := strconv.ParseUint(args[0], 10, 31)
		if err != nil || n == 0 {
			return usage("level %q: want a whole number from 1 on", args[0])
		}
		err = admin(cmd, "raise level", func(ctx context.Context, a malachiv1connect.AdminServiceClient) error {
			_, err := a.RaiseLevel(ctx, &v1.RaiseLevelRequest{Level: int32(n)})
			return err
		})
		if err == nil {
			say(std.err, "the cluster is at level %d", n)
		}
		return err
	}
	return cmd
}

func newBroker(std streams) *cobra.Command {
	state := func(use, short, long, to string) *cobra.Command {
		cmd := &cobra.Command{Use: use + " BROKER", Short: short, Long: long, Args: oneArg("broker")}
		out := listFlag(cmd)
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			var resp *v1.SetBrokerStateResponse
			err := admin(cmd, use+" broker", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
				resp, err = a.SetBrokerState(ctx, &v1.SetBrokerStateRequest{Broker: args[0], State: to})
				return err
			})
			if err != nil {
				return err
			}
			return show(std.out, out.value, resp, brokerTable([]*v1.Broker{resp.GetBroker()}))
		}
		return cmd
	}
	return newGroup("broker", "List brokers, drain and decommission them", newBrokerList(std),
		state("drain", "Move open segments off a broker, and place none there",
			"Move open segments off a broker, and place none there, until it is activated again. `malachi broker list` shows what is left.", "draining"),
		state("decommission", "Take a broker out of the cluster for ever",
			"Move everything off a broker, then take it out of the cluster for ever. `malachi broker list` shows what it waits for. A broker that is\n"+
				"draining is activated first: the two exclude each other.", "decommissioning"),
		state("activate", "Take back a drain or decommission", "Take back a drain or decommission that has not ended.", "active"))
}

func newBrokerList(std streams) *cobra.Command {
	cmd := &cobra.Command{Use: "list", Aliases: []string{"ls"}, Short: "List brokers", Args: noArgs}
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		resp, err := clusterStatus(cmd)
		if err != nil {
			return err
		}
		return show(std.out, out.value, &v1.GetClusterStatusResponse{Brokers: resp.GetBrokers()}, brokerTable(resp.GetBrokers()))
	}
	return cmd
}

func newRange(std streams) *cobra.Command {
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List ranges that cannot be written now, and what each waits for",
		Long: "List ranges that cannot be written now, over all topics, and what each waits for. The ranges of one topic: malachi topic describe.",
		Args: noArgs,
	}
	blocked := cmd.Flags().Bool("blocked", false, "only blocked ones; required: the list of all would be the list of all topics")
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !*blocked {
			return usage("malachi range list needs --blocked; the ranges of one topic: malachi topic describe TOPIC")
		}
		var resp *v1.ListBlockedRangesResponse
		err := admin(cmd, "list blocked ranges", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.ListBlockedRanges(ctx, &v1.ListBlockedRangesRequest{})
			return err
		})
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, func(row func(...any)) {
			row("TOPIC", "RANGE", "WAITS FOR")
			for _, r := range resp.GetRanges() {
				row(r.GetTopic(), r.GetRange(), r.GetBy())
			}
		})
	}
	return newGroup("range", "List blocked ranges", cmd)
}
