package api

import "pando/internal/driver"

// GoldenSet is a golden that has other properties now.
type GoldenSet struct {
	Golden
	Removed []string `json:"removed"` // references to generations that the golden no longer keeps
}

// GoldenRenamed is a golden that has another name now.
type GoldenRenamed struct {
	Golden
	Before string `json:"ref_before"` // reference to the golden until now
}

// Labelled says what the labels of something are.
type Labelled struct {
	Ref    string        `json:"ref"`    // reference to the volume, snapshot or golden
	Labels driver.Labels `json:"labels"` // labels that it has now
}

// Version says which program answers.
type Version struct {
	Version        string `json:"version"`         // version of Pando
	Go             string `json:"go"`              // version of Go that it was built with
	OS             string `json:"os"`              // operating system
	Arch           string `json:"arch"`            // architecture of the processor
	IdentityFormat int    `json:"identity_format"` // version of the identity files that it writes
}
