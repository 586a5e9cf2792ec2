//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// record is a line of the log: a test that ran with a seed and a shard, or a fuzz target.
type record struct {
	Package string   `json:"package"`         // directory of the package
	Test    string   `json:"test"`            // top-level test, or fuzz target
	Seed    uint64   `json:"seed,omitempty"`  // PANDO_SEED
	Shard   int      `json:"shard"`           // PANDO_SHARD
	Round   int      `json:"round"`           // how many shards cover what the test samples most densely
	Of      int      `json:"of"`              // how many cover everything; 0: the test draws nothing
	Done    []string `json:"done,omitempty"`  // subtests that ended, if the time was up before the test did
	Found   int      `json:"found,omitempty"` // how many subtests failed
	Seconds float64  `json:"seconds"`         // how long the run took
	Commit  string   `json:"commit"`          // of the code that ran; "+" is appended if files differed from it
}

// log is the file that says what has been searched. Lines are only ever added to it.
type log struct{ file *os.File }

// openLog returns the log, and the records that it has.
func openLog(path string) (l log, all []record, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return l, nil, err
	}
	l.file, err = os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o666)
	if err != nil {
		return l, nil, err
	}

	lines := bufio.NewScanner(l.file)
	lines.Buffer(nil, 1<<24)
	for n := 1; lines.Scan(); n++ {
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return l, nil, errors.Join(fmt.Errorf("%s:%d: %w; remove it to begin anew", path, n, err), l.file.Close())
		}
		all = append(all, r)
	}
	return l, all, lines.Err()
}

// add appends a record, in one write, so that a line is whole or missing.
func (l log) add(r record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = l.file.Write(append(line, '\n'))
	return err
}
