package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// licence is one file with the terms of a module.
type licence struct {
	file string
	ids  []string // of SPDX; none if the file only adds notices to those with terms
	text string
}

var licenceFile = regexp.MustCompile(`(?i)^([a-z]+-)?(licen[sc]e|copying|notice|patents)([-.].*)?$`)

// readLicences returns the licences in the top directory of a module. It fails if there is none that it knows:
// somebody has to look at that one before it is given to others.
func readLicences(dir string) ([]licence, error) {
	if dir == "" {
		return nil, errors.New("its sources are not here: run `go mod download`")
	}

	entries, err := os.ReadDir(dir) // in order of their names
	if err != nil {
		return nil, err
	}

	var out []licence
	known := false
	for _, e := range entries {
		if !e.Type().IsRegular() || !licenceFile.MatchString(e.Name()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		l := licence{file: e.Name(), ids: identify(string(text)), text: string(text)}
		known = known || len(l.ids) > 0
		out = append(out, l)
	}

	if !known {
		return nil, fmt.Errorf("no license that is known in %s: look at it, then teach tools/sbom", dir)
	}

	return out, nil
}

// terms are phrases that all texts of a licence have, by its SPDX identifier.
var terms = []struct {
	id      string
	phrases []string
}{
	{"Apache-2.0", []string{"Apache License", "Version 2.0"}},
	{"MPL-2.0", []string{"Mozilla Public License", "2.0"}},
	{"MIT", []string{"Permission is hereby granted, free of charge"}},
	{"ISC", []string{"Permission to use, copy, modify, and", "distribute this software"}},
	{"BSD-3-Clause", []string{"Redistribution and use in source and binary forms", "Neither the name"}},
	{"BSD-2-Clause", []string{"Redistribution and use in source and binary forms"}},
	{"blessing", []string{"disclaims copyright to this source code"}},
}

// identify returns the SPDX identifiers of the licences in a text. Of one that would bind all of the program it
// knows nothing: that is for people to decide.
func identify(text string) []string {
	text = strings.Join(strings.Fields(text), " ")
	if strings.Contains(strings.ToUpper(text), "GENERAL PUBLIC LICENSE") {
		return nil
	}

	var ids []string
	for _, t := range terms {
		all := !slices.ContainsFunc(t.phrases, func(p string) bool { return !strings.Contains(text, p) })
		if all && !(t.id == "BSD-2-Clause" && slices.Contains(ids, "BSD-3-Clause")) {
			ids = append(ids, t.id)
		}
	}

	return ids
}
