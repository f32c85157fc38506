package main

import (
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/malachilog/malachi/storage"
	"github.com/malachilog/malachi/storage/datadir"
)

func newVersion(std streams) *cobra.Command {
	cmd := &cobra.Command{Use: "version", Short: "Show what this build is and which data it knows", Args: noArgs}
	out := listFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		v := struct {
			Version string `json:"version"`
			Go      string `json:"go"`
			OS      string `json:"os"`
			Arch    string `json:"arch"`
			// Format and Level are the newest that this build reads and writes.
			Format int           `json:"format"`
			Level  storage.Level `json:"level"`
		}{version, runtime.Version(), runtime.GOOS, runtime.GOARCH, datadir.Format, storage.CurrentLevel}
		if out.value == "table" {
			_, err := fmt.Fprintf(std.out, "malachi %s (%s, %s/%s), data format %d, level %d\n", v.Version, v.Go, v.OS, v.Arch, v.Format, v.Level)
			return err
		}
		b, err := json.Marshal(v)
		if err != nil {
			return err
		}
		return showJSON(std.out, out.value, b)
	}
	return cmd
}
