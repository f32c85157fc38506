package metadata

import (
	"fmt"

	"github.com/malachilog/malachi/storage"
)

// ValidTopicName reports what is wrong with a topic name: storage.ErrInvalid with a text that says what is allowed.
func ValidTopicName(name string) error {
	const allowed = "a topic name has 1 to 249 characters of A-Z a-z 0-9 . _ - and begins with a letter or digit"
	switch {
	case name == "":
		return fmt.Errorf("the topic name is empty: %s: %w", allowed, storage.ErrInvalid)
	case len(name) > storage.MaxTopicName:
		return fmt.Errorf("the topic name %.20q... has %d characters: %s: %w", name, len(name), allowed, storage.ErrInvalid)
	}
	for i := range len(name) {
		c := name[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || c != '.' && c != '_' && c != '-') {
			return fmt.Errorf("topic name %.40q, character %d: %s: %w", name, i+1, allowed, storage.ErrInvalid)
		}
	}
	return nil
}

// Bounds of a topic's labels.
const (
	MaxLabels     = 64
	MaxLabelKey   = 128
	MaxLabelValue = 1024
)

// ValidLabels reports what is wrong with labels: storage.ErrInvalid or storage.ErrTooLarge, naming the limit.
func ValidLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return fmt.Errorf("%d labels: a topic has at most %d: %w", len(labels), MaxLabels, storage.ErrTooLarge)
	}
	for k, v := range labels {
		switch {
		case k == "":
			return fmt.Errorf("a label key is empty: %w", storage.ErrInvalid)
		case len(k) > MaxLabelKey:
			return fmt.Errorf("label key %.20q... has %d bytes, at most %d: %w", k, len(k), MaxLabelKey, storage.ErrTooLarge)
		case len(v) > MaxLabelValue:
			return fmt.Errorf("label %.40q has a value of %d bytes, at most %d: %w", k, len(v), MaxLabelValue, storage.ErrTooLarge)
		}
		if !validUTF8(k) || !validUTF8(v) {
			return fmt.Errorf("label %.40q is not UTF-8: %w", k, storage.ErrInvalid)
		}
	}
	return nil
}

// ValidInitialRanges reports whether n is a power of two of 1..256: storage.ErrInvalid if not.
func ValidInitialRanges(n int) error {
	if n < 1 || n > storage.MaxInitialRanges || n&(n-1) != 0 {
		return fmt.Errorf("initial_ranges %d: want a power of two, 1 to %d: %w", n, storage.MaxInitialRanges, storage.ErrInvalid)
	}
	return nil
}
