package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const bsd = "Redistribution and use in source\n and binary forms ... Neither the name of"

func TestIdentify(t *testing.T) {
	for text, want := range map[string]string{
		"Apache License\n   Version 2.0, January 2004":  "Apache-2.0",
		"Permission is hereby granted,\nfree of charge": "MIT",
		bsd:                                  "BSD-3-Clause",
		strings.Split(bsd, " ...")[0]:        "BSD-2-Clause",
		bsd + "\nApache License Version 2.0": "Apache-2.0 BSD-3-Clause",
		"GNU Lesser General Public License, or the Apache License Version 2.0": "",
		"All rights reserved": "",
	} {
		if got := strings.Join(identify(text), " "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestModulesNeedALicence(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("README.md", bsd)
	put("NOTICE", "made by people")
	if l, err := readLicences(dir); err == nil {
		t.Errorf("a notice was taken for a licence: %v", l)
	}
	put("LICENSE-SOME.md", bsd)
	l, err := readLicences(dir)
	if err != nil || len(l) != 2 || l[0].file != "LICENSE-SOME.md" || l[1].text != "made by people" {
		t.Errorf("%v, %v", l, err)
	}
	if _, err := readLicences(""); err == nil {
		t.Error("no directory, no error")
	}
}

// TestBillOfThisTest: the program of this test has the standard library in it and no other module.
func TestBillOfThisTest(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("SKIPPED: there is no go in PATH")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p, err := read(self, "1.2.0")
	if err != nil {
		t.Fatal(err)
	}
	if len(p.modules) != 1 || p.modules[0].path != "std" || p.name != "pando" || p.arch == "" {
		t.Errorf("%+v", p)
	}
	if !bytes.Contains(p.notices(), []byte("The Go Authors")) {
		t.Errorf("notices:\n%s", p.notices())
	}
}

func TestCycloneDX(t *testing.T) {
	p := &program{name: "pando", version: "1.2.0", arch: "arm64", sha256: "00ff", modules: []module{
		{path: "std", version: "1.26.8", licences: []licence{{ids: []string{"BSD-3-Clause"}}}},
		{path: "example.org/<a>", version: "v2.0.0+incompatible", sum: "h1:x=", licences: []licence{
			{ids: []string{"MIT"}}, {file: "NOTICE"}, {ids: []string{"MIT", "Apache-2.0"}},
		}},
	}}
	text := p.cycloneDX()
	if !bytes.Equal(text, p.cycloneDX()) {
		t.Error("the same program has two bills")
	}
	var b bom
	if err := json.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	const purl = "pkg:golang/example.org/<a>@v2.0.0%2Bincompatible"
	c := b.Components[1]
	if c.PURL != purl || len(c.Licences) != 2 || c.Licences[1].Licence.ID != "Apache-2.0" ||
		c.Properties[0].Value != "h1:x=" {
		t.Errorf("%+v", c)
	}
	if d := b.Dependencies[0]; d.Ref != b.Metadata.Component.Ref || !slices.Contains(d.DependsOn, purl) {
		t.Errorf("%+v", d)
	}
	for _, no := range []string{"timestamp", "serialNumber"} {
		if bytes.Contains(text, []byte(no)) {
			t.Errorf("there is a %s", no)
		}
	}
}
