package transport

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
)

// maxKeys bounds the keys of a file.
const maxKeys = 16

// KeyFile is a file of gossip keys: one a line, base64 of 16, 24 or 32 bytes; the first encrypts, all decrypt. Empty lines and lines that
// begin with # count for nothing.
type KeyFile struct {
	path string
	deps Deps

	keys atomic.Pointer[[][]byte]

	mu     sync.Mutex // of Reload
	stamps stamps
}

// OpenKeys reads the file. Errors: *FileError.
func OpenKeys(path string, deps Deps) (*KeyFile, error) {
	k := &KeyFile{path: path, deps: deps.withDefaults(), stamps: look(path)}
	keys, err := readKeys(path)
	if err != nil {
		return nil, err
	}
	k.keys.Store(&keys)
	return k, nil
}

func readKeys(path string) ([][]byte, error) {
	const what = "gossip keys"
	b, err := read(what, path)
	if err != nil {
		return nil, err
	}
	var keys [][]byte
	for i, line := range strings.Split(string(b), "\n") {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		bad := func(fault string) ([][]byte, error) {
			return nil, &FileError{What: what, Path: path, Fault: fmt.Sprintf("line %d %s", i+1, fault), Advice: "make keys with: openssl rand -base64 32"}
		}
		key, err := base64.StdEncoding.DecodeString(line)
		switch n := len(key); {
		case err != nil:
			return bad("is not base64") // the cause would quote the line
		case n != 16 && n != 24 && n != 32:
			return bad(fmt.Sprintf("is a key of %d bytes, want 16, 24 or 32", n))
		case len(keys) == maxKeys:
			return bad(fmt.Sprintf("is one key more than %d", maxKeys))
		}
		for _, o := range keys {
			if bytes.Equal(o, key) {
				return bad("repeats a key")
			}
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, &FileError{What: what, Path: path, Fault: "it holds no key", Advice: "make one with: openssl rand -base64 32"}
	}
	return keys, nil
}

// Keys returns the keys as last read. The caller must not change them.
func (k *KeyFile) Keys() [][]byte { return *k.keys.Load() }

// Reload looks at the file once. If it changed, can be used and holds other keys, they are handed to use; if use refuses them, they are not
// taken over. What can't be used is returned, and logged, once per change of the file.
func (k *KeyFile) Reload(use func([][]byte) error) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	stamps := look(k.path)
	if stamps.same(k.stamps) {
		return false, nil
	}
	k.stamps = stamps
	keys, err := readKeys(k.path)
	if err == nil && equalKeys(keys, k.Keys()) {
		return false, nil
	}
	if err == nil {
		err = use(keys)
	}
	if err != nil {
		k.deps.Logger.Warn("changed gossip keys can't be used; the ones before stay in use", "error", err)
		return false, err
	}
	k.keys.Store(&keys)
	k.deps.Logger.Info("gossip keys taken over", "file", k.path, "keys", len(keys))
	return true, nil
}

// Run looks at the file every few seconds until ctx ends, and hands new keys to use, one call at a time. It returns nil.
func (k *KeyFile) Run(ctx context.Context, use func([][]byte) error) error {
	return every(ctx, func() { _, _ = k.Reload(use) }) // Reload has logged it
}
