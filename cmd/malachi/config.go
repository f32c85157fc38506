package main

import (
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"

	"github.com/malachilog/malachi/e2e/inv/mutate"
	"github.com/malachilog/malachi/services/broker"
	"github.com/malachilog/malachi/storage"
)

const (
	envPrefix = "MALACHI_"
	maxConfig = 1 << 20 // bytes of a configuration file
)

// serverConfig is what `malachi server` runs with.
type serverConfig struct {
	broker.Config
	logLevel slog.Level
}

// setting is one key of the configuration. set takes the value as text.
type setting struct {
	key string
	set func(*serverConfig, string) error
}

// settings are all keys there are.
var settings = []setting{
	{"data", text(func(c *serverConfig) *string { return &c.Data })},
	{"raft_dir", text(func(c *serverConfig) *string { return &c.RaftDir })},
	{"api", text(func(c *serverConfig) *string { return &c.API })},
	{"ops", text(func(c *serverConfig) *string { return &c.Ops })},
	{"rpc", text(func(c *serverConfig) *string { return &c.RPC })},
	{"raft", text(func(c *serverConfig) *string { return &c.Raft })},
	{"gossip", text(func(c *serverConfig) *string { return &c.Gossip })},
	{"advertise", text(func(c *serverConfig) *string { return &c.Advertise })},
	{"bootstrap", boolean(func(c *serverConfig) *bool { return &c.Bootstrap })},
	{"bootstrap_expect", number(func(c *serverConfig) *int { return &c.BootstrapExpect })},
	{"founders", list(func(c *serverConfig) *[]string { return &c.Founders })},
	{"join", list(func(c *serverConfig) *[]string { return &c.Join })},
	{"attributes", func(c *serverConfig, s string) (err error) {
		c.Attributes, err = parseAttributes(strings.Split(s, ","))
		return err
	}},
	{"tls_cert", text(func(c *serverConfig) *string { return &c.TLS.Cert })},
	{"tls_key", text(func(c *serverConfig) *string { return &c.TLS.Key })},
	{"tls_ca", text(func(c *serverConfig) *string { return &c.TLS.CA })},
	{"gossip_keys", text(func(c *serverConfig) *string { return &c.GossipKeys })},
	{"insecure", boolean(func(c *serverConfig) *bool { return &c.Insecure })},
	{"vnodes", number(func(c *serverConfig) *int { return &c.Vnodes })},
	{"election_timeout", duration(func(c *serverConfig) *time.Duration { return &c.ElectionTimeout })},
	{"segment_max_bytes", size(func(c *serverConfig, n uint64) { c.SegmentMaxBytes = int64(n) })},
	{"segment_max_age", duration(func(c *serverConfig) *time.Duration { return &c.SegmentMaxAge })},
	{"journal_file_bytes", size(func(c *serverConfig, n uint64) { c.JournalFileBytes = int64(n) })},
	{"journal_max_bytes", size(func(c *serverConfig, n uint64) { c.JournalMaxBytes = int64(n) })},
	{"disk_reserve", size(func(c *serverConfig, n uint64) { c.DiskReserve = n })},
	{"drain_grace", duration(func(c *serverConfig) *time.Duration { return &c.DrainGrace })},
	{"log_level", func(c *serverConfig, s string) error {
		if err := c.logLevel.UnmarshalText([]byte(s)); err != nil {
			return fmt.Errorf("want debug, info, warn or error")
		}
		return nil
	}},
}

// lists are the keys that take several values.
var lists = []string{"founders", "join", "attributes"}

func text(field func(*serverConfig) *string) func(*serverConfig, string) error {
	return func(c *serverConfig, s string) error {
		if s == "" {
			return fmt.Errorf("it is empty: leave the key out for the default")
		}
		*field(c) = s
		return nil
	}
}

func number(field func(*serverConfig) *int) func(*serverConfig, string) error {
	return func(c *serverConfig, s string) error {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return fmt.Errorf("want a whole number from 1 on")
		}
		*field(c) = n
		return nil
	}
}

func list(field func(*serverConfig) *[]string) func(*serverConfig, string) error {
	return func(c *serverConfig, s string) error {
		for word := range strings.SplitSeq(s, ",") {
			if word = strings.TrimSpace(word); word == "" {
				return fmt.Errorf("want a list of addresses")
			}
			*field(c) = append(*field(c), word)
		}
		return nil
	}
}

// parseAttributes reads name=value pairs.
func parseAttributes(pairs []string) (map[string]string, error) {
	out := map[string]string{}
	for _, p := range pairs {
		name, value, ok := strings.Cut(strings.TrimSpace(p), "=")
		if !ok || name == "" || value == "" {
			return nil, fmt.Errorf("attribute %q: want name=value", p)
		}
		if _, twice := out[name]; twice {
			return nil, fmt.Errorf("attribute %s stands there twice", name)
		}
		out[name] = value
	}
	return out, nil
}

func boolean(field func(*serverConfig) *bool) func(*serverConfig, string) error {
	return func(c *serverConfig, s string) error {
		switch s {
		case "true":
			*field(c) = true
		case "false":
			*field(c) = false
		default:
			return fmt.Errorf("want true or false")
		}
		return nil
	}
}

// errZero: the broker takes 0 as "not set", and a person who writes 0 hardly means the default.
var errZero = fmt.Errorf("0 is not a value: leave the key out for the default")

func duration(field func(*serverConfig) *time.Duration) func(*serverConfig, string) error {
	return func(c *serverConfig, s string) error {
		d, err := parseDuration(s)
		switch {
		case s == "0" || err == nil && d == 0:
			return errZero
		case err != nil:
			return err
		}
		*field(c) = d
		return nil
	}
}

func size(set func(*serverConfig, uint64)) func(*serverConfig, string) error {
	return func(c *serverConfig, s string) error {
		n, err := parseSize(s)
		switch {
		case err != nil:
			return err
		case n == 0:
			return errZero
		}
		set(c, n)
		return nil
	}
}

// faults are everything that is wrong with a configuration.
type faults struct{ list []string }

// Error is one fault a line.
func (f faults) Error() string {
	if len(f.list) == 1 {
		return "configuration: " + f.list[0]
	}
	return fmt.Sprintf("configuration: %d faults:\n  %s", len(f.list), strings.Join(f.list, "\n  "))
}

func (f *faults) add(format string, args ...any) {
	f.list = append(f.list, fmt.Sprintf(format, args...))
}

// loadConfig reads a YAML file ("" for none) and, over it, the environment: MALACHI_<KEY>. It reports every fault at once as faults in a
// usageError: keys that do not exist with the nearest that does, values that do not parse, and what broker.Config.Validate finds.
func loadConfig(path string, environ []string) (serverConfig, error) {
	cfg := serverConfig{Config: broker.Config{Version: version}}
	k := koanf.New("\x00") // no key has it: keys are flat
	if path != "" {
		if err := checkFile(path); err != nil {
			return cfg, err
		}
		if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
			return cfg, usage("configuration %s: %s", path, strings.Join(strings.Fields(err.Error()), " "))
		}
	}
	var bad faults
	names := keyNames()
	for _, key := range k.Keys() {
		if !slices.Contains(names, key) && !mutate.On("config.ignore-unknown-key") {
			bad.add("%s: no such key%s", strings.ReplaceAll(key, "\x00", "."), didYouMean(key, names, "the keys are "+strings.Join(names, ", ")))
		}
	}
	fromEnv, err := readEnv(environ, names, &bad)
	if err != nil {
		return cfg, err
	}
	for _, s := range settings {
		value, source := k.Get(s.key), s.key
		if v, ok := fromEnv[s.key]; ok {
			value, source = v, envPrefix+strings.ToUpper(s.key)
		}
		if value == nil && !k.Exists(s.key) {
			continue
		}
		word, ok := scalar(value)
		if _, several := value.([]any); several && !slices.Contains(lists, s.key) {
			ok = false
		}
		if !ok {
			bad.add("%s: want one value", source)
			continue
		}
		if err := s.set(&cfg, word); err != nil {
			bad.add("%s %q: %v", source, word, err)
		}
	}
	if err := cfg.Validate(); err != nil {
		for _, line := range strings.Split(err.Error(), "\n") {
			bad.add("%s", strings.TrimSuffix(line, ": "+storage.ErrInvalid.Error()))
		}
	}
	if len(bad.list) > 0 {
		return cfg, usageError{bad}
	}
	return cfg, nil
}

func keyNames() (names []string) {
	for _, s := range settings {
		names = append(names, s.key)
	}
	return names
}

func checkFile(path string) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Errorf("configuration: %w", err)
	case !st.Mode().IsRegular():
		return usage("configuration %s: it is not a file", path)
	case st.Size() > maxConfig:
		return usage("configuration %s: %d bytes; at most %d are read", path, st.Size(), maxConfig)
	}
	return nil
}

// foreignEnv are variables with our prefix that are not ours: those of other parts of Malachi, and those that Kubernetes and Docker set
// for services whose name begins with "malachi".
var foreignEnv = regexp.MustCompile(`^(SERVER|MUTATE|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?))$`)

// readEnv gives the keys that the environment sets. A variable with our prefix that is no key is a fault: a typing error must not start
// a broker with the default.
func readEnv(environ []string, names []string, bad *faults) (map[string]any, error) {
	m, err := env.Provider("", env.Opt{Prefix: envPrefix, EnvironFunc: func() []string { return environ }, TransformFunc: func(k, v string) (string, any) {
		word := strings.TrimPrefix(k, envPrefix)
		key := strings.ToLower(word)
		switch {
		case slices.Contains(names, key) && word == strings.ToUpper(word):
			return key, v
		case !foreignEnv.MatchString(word):
			upper := make([]string, len(names))
			for i, n := range names {
				upper[i] = envPrefix + strings.ToUpper(n)
			}
			bad.add("%s: no key has this variable%s", k, didYouMean(k, upper, "unset it"))
		}
		return "", nil
	}}).Read()
	if err != nil {
		return nil, fmt.Errorf("read the environment: %w", err)
	}
	return m, nil
}

// scalar is a YAML value as the text that a person wrote, as far as that is known, a list with commas between; false for maps and null.
func scalar(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case bool, int, int64, uint64:
		return fmt.Sprint(v), true
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64), true
	case []any:
		var words []string
		for _, e := range v {
			word, ok := scalar(e)
			if !ok || strings.Contains(word, ",") {
				return "", false
			}
			words = append(words, word)
		}
		return strings.Join(words, ","), len(words) > 0
	}
	return "", false
}
