package main

import (
	"context"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "github.com/malachilog/malachi/gen/go/malachi/v1"
	"github.com/malachilog/malachi/gen/go/malachi/v1/malachiv1connect"
)

func newPolicy(std streams) *cobra.Command {
	return newGroup("policy", "Show and change how topics are kept", newPolicyDescribe(std), newPolicyUpdate(std))
}

func newPolicyDescribe(std streams) *cobra.Command {
	cmd := &cobra.Command{
		Use: "describe NAME", Short: "Show the policy; \"default\" is the only one", Example: "  malachi policy describe default", Args: oneArg("policy"),
	}
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var resp *v1.DescribePolicyResponse
		err := admin(cmd, "describe policy", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.DescribePolicy(ctx, &v1.DescribePolicyRequest{Name: args[0]})
			return err
		})
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, policyTable(resp.GetPolicy()))
	}
	return cmd
}

func policyTable(p *v1.Policy) func(row func(...any)) {
	return func(row func(...any)) {
		row("FIELD", "VALUE")
		row("name", p.GetName())
		row("version", p.GetVersion())
		row("replication_factor", p.GetReplicationFactor())
		if p.MinReplicas == nil {
			row("min_replicas", "(unset: the quorum)")
		} else {
			row("min_replicas", p.GetMinReplicas())
		}
		row("acks", p.GetAcks())
		row("quorum", p.GetQuorum())
		row("spread_by", p.GetSpreadBy())
		row("min_domains", p.GetMinDomains())
		row("placement", p.GetPlacement())
		row("segment_max_bytes", p.GetSegmentMaxBytes())
		row("segment_max_age", p.GetSegmentMaxAge().AsDuration())
	}
}

func newPolicyUpdate(std streams) *cobra.Command {
	cmd := &cobra.Command{
		Use: "update NAME", Short: "Change fields of the policy; the others stay",
		Long: "Change fields of the policy; the others stay. Open segments keep the replicas and the quorum that they were opened with: where the\n" +
			"change asks for other ones, their ranges go on in new segments.",
		Example: "  malachi policy update default --replication-factor 3\n  malachi policy update default --spread-by zone --min-domains 2 --placement hard",
		Args:    oneArg("policy"),
	}
	f := cmd.Flags()
	version := f.Uint64("expect-version", 0, "change it only if it has this version")
	rf := f.Int32("replication-factor", 0, "copies of every record, 1 to 7")
	min := f.Int32("min-replicas", 0, "open no segment with fewer live replicas; 0 unsets it")
	acks := f.String("acks", "", "quorum or all")
	spread := f.String("spread-by", "", "attribute of brokers to spread copies over; empty: over none")
	domains := f.Int32("min-domains", 0, "values of it that a set should reach; 0 asks for none")
	place := f.String("placement", "", "soft or hard: place a set that reaches fewer all the same, or refuse")
	size := f.String("segment-max-bytes", "", "close a segment at this size, such as 256MiB")
	age := f.String("segment-max-age", "", "close a segment at this age, such as 1h")
	out := listFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req := &v1.UpdatePolicyRequest{Name: args[0], ExpectVersion: *version}
		given := func(flag string, set func()) bool {
			if !f.Changed(flag) {
				return false
			}
			set()
			return true
		}
		any := given("replication-factor", func() { req.ReplicationFactor = rf })
		any = given("min-replicas", func() { req.MinReplicas = min }) || any
		any = given("acks", func() { req.Acks = acks }) || any
		any = given("spread-by", func() { req.SpreadBy = spread }) || any
		any = given("min-domains", func() { req.MinDomains = domains }) || any
		any = given("placement", func() { req.Placement = place }) || any
		if f.Changed("segment-max-bytes") {
			n, err := parseSize(*size)
			if err != nil {
				return usage("--segment-max-bytes %q: %v", *size, err)
			}
			req.SegmentMaxBytes, any = &n, true
		}
		if f.Changed("segment-max-age") {
			d, err := parseDuration(*age)
			if err != nil {
				return usage("--segment-max-age %q: %v", *age, err)
			}
			req.SegmentMaxAge, any = durationpb.New(d), true
		}
		if !any {
			return usage("%s: nothing to change: give a flag", cmd.CommandPath())
		}
		var resp *v1.UpdatePolicyResponse
		err := admin(cmd, "update policy", func(ctx context.Context, a malachiv1connect.AdminServiceClient) (err error) {
			resp, err = a.UpdatePolicy(ctx, req)
			return err
		})
		if err != nil {
			return err
		}
		return show(std.out, out.value, resp, policyTable(resp.GetPolicy()))
	}
	return cmd
}
