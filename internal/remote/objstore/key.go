package objstore

import (
	"strings"

	"pando/internal/base/errs"
)

// CheckKey returns an error of kind Invalid if a key is not valid. Every Store calls
// it first, so that a key that one store cannot hold is refused by all.
func CheckKey(key string) error {
	why := ""
	switch {
	case key == "":
		why = "it is empty"
	case len(key) > MaxKeyBytes:
		why = "it is too long"
	default:
		for word := range strings.SplitSeq(key, "/") {
			if why = wordFault(word); why != "" {
				break
			}
		}
	}

	if why != "" {
		return errs.New(errs.Invalid, "check key", shorten(key), "%s", why)
	}

	return nil
}

func wordFault(word string) string {
	switch {
	case word == "":
		return "it begins or ends with a slash, or has two slashes in a row"
	case len(word) > MaxWordBytes:
		return "one of its words is too long"
	case word[0] == '.':
		return "one of its words begins with a dot" // "..", and the own files of a store in a directory
	}

	for _, c := range []byte(word) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '.' && c != '-' {
			return "it has characters other than a-z, 0-9, '_', '.', '-' and '/'"
		}
	}

	return ""
}

// CheckPrefix is [CheckKey] for the prefix of a listing: the beginning of a key, or "".
func CheckPrefix(prefix string) error {
	if prefix == "" {
		return nil
	}
	// Keys with the prefix "a/" have at least one more character.
	if strings.HasSuffix(prefix, "/") {
		return CheckKey(prefix + "x")
	}
	return CheckKey(prefix)
}

// CheckPut checks the arguments of Put for every Store: the key, and the size of the
// object.
func CheckPut(key string, data []byte) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if len(data) > MaxObjectBytes {
		return errs.New(errs.Invalid, "write object", key, "it has %d bytes, but objects have at most %d",
			len(data), MaxObjectBytes)
	}
	return nil
}

// CheckGet checks the arguments of Get for every Store.
func CheckGet(key string, offset int64) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if offset < 0 {
		return errs.New(errs.Invalid, "read object", key, "the offset must not be negative (got %d)", offset)
	}
	return nil
}

// shorten cuts a long invalid key, so that it does not fill the screen.
func shorten(s string) string {
	if len(s) > 100 {
		return s[:100] + "..."
	}
	return s
}
