package driver

import "encoding/json"

// Build records how a command has built a generation, so that the same build need not run again. Its JSON form is part
// of the identity: see FORMAT.md.
type Build struct {
	Key     string   `json:"key"`               // it is found again by, within its golden
	Base    ObjectID `json:"base"`              // the generation or snapshot that the key is valid for
	Parent  ObjectID `json:"parent,omitempty"`  // that the command ran in a clone of, if it is not Base: the step before
	Command string   `json:"command,omitempty"` // SHA-256 of the command and its arguments, in hexadecimal
}

// IsZero reports whether there is no record, because the generation was not built by a command.
func (b Build) IsZero() bool { return b == Build{} }

// Made returns what the command ran in a clone of.
func (b Build) Made() ObjectID {
	if b.Parent != "" {
		return b.Parent
	}
	return b.Base
}

// Text returns the record as JSON, without control characters; "" if there is none. StoredBuild reads it.
func (b Build) Text() string {
	if b.IsZero() {
		return ""
	}
	text, _ := json.Marshal(b) // strings only
	return string(text)
}

// StoredBuild returns the record of which Text returned text.
func StoredBuild(text string) Build {
	var b Build
	if text != "" {
		_ = json.Unmarshal([]byte(text), &b) // damaged: there is no record, and the build runs again
	}
	return b
}
