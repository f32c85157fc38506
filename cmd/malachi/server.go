package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/services/broker"
)

func newServer(std streams) *cobra.Command {
	var (
		config, readyFile string
		check             bool
	)
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run a broker from a configuration",
		Long: "Run a broker from a YAML file, a commented example of which is deploy/server.example.yaml. An environment variable MALACHI_<KEY>\n" +
			"wins over the file. A key that does not exist is refused, and all faults are told at once.",
		Example: "  malachi server --config /etc/malachi/server.yaml\n" +
			"  MALACHI_DATA=/var/lib/malachi MALACHI_BOOTSTRAP=true malachi server",
		Args: noArgs,
	}
	cmd.Flags().StringVarP(&config, "config", "c", "", "YAML `FILE`; without it only the environment counts")
	cmd.Flags().StringVar(&readyFile, "ready-file", "", "write where the broker listens to this `FILE` once it serves")
	cmd.Flags().BoolVar(&check, "check", false, "check the configuration and exit")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("config") && config == "" {
			return usage("--config is empty: name a file")
		}
		cfg, err := loadConfig(config, os.Environ())
		if err != nil {
			return err
		}
		if check {
			say(std.err, "configuration is valid")
			return nil
		}
		return launch{
			cfg: cfg.Config, level: cfg.logLevel, readyFile: readyFile,
			restart: func(b *broker.Broker) string { return restartServer(config, readyFile, b) },
			greet: func(b *broker.Broker) {
				say(std.err, "malachi %s serves %s on http://%s, operations on http://%s", version, absolute(cfg.Data), b.APIAddr(), b.OpsAddr())
			},
		}.run(cmd.Context(), std)
	}
	return cmd
}

// restartServer starts this broker again on the same data and ports, with the variables that it was started with.
func restartServer(config, readyFile string, b *broker.Broker) string {
	words := []string{"env"}
	for _, v := range os.Environ() {
		key, _, _ := strings.Cut(strings.TrimPrefix(v, envPrefix), "=")
		if strings.HasPrefix(v, envPrefix) && key != "API" && key != "OPS" && !foreignEnv.MatchString(key) {
			words = append(words, v)
		}
	}
	words = append(words, envPrefix+"API="+b.APIAddr(), envPrefix+"OPS="+b.OpsAddr(), self(), "server")
	if config != "" {
		words = append(words, "--config", absolute(config))
	}
	if readyFile != "" {
		words = append(words, "--ready-file", absolute(readyFile))
	}
	return quoteArgs(words...)
}
