// Sbom says what a program of Go consists of, from what the compiler has recorded in it:
//
//	sbom -version 1.2.0 [-sbom FILE] [-notices FILE] PROGRAM
//
// -sbom gets a software bill of materials (CycloneDX 1.6, JSON): the modules in PROGRAM with versions, checksums and
// licences. -notices gets the texts of these licences, which must go with the program. The same program leads to
// the same bytes: there is neither a time nor a serial number. It is run in the module that PROGRAM was built from,
// whose go.mod says where sources are, and fails if a module has no licence that it knows.
package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
)

// module is a part of the program that has a version and a licence of its own.
type module struct {
	path, version string
	sum           string // as in go.sum; "" for the standard library
	licences      []licence
}

// program is what is known of a program.
type program struct {
	name, version, arch string
	sha256              string
	modules             []module // the standard library first, then by path
}

func main() {
	version := flag.String("version", "dev", "version of the program")
	sbom := flag.String("sbom", "", "write the bill of materials into this file")
	notices := flag.String("notices", "", "write the texts of licences into this file")
	flag.Parse()

	if err := write(flag.Args(), *version, *sbom, *notices); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func write(args []string, version, sbom, notices string) error {
	if len(args) != 1 {
		return errors.New("usage: sbom -version VERSION [-sbom FILE] [-notices FILE] PROGRAM")
	}

	p, err := read(args[0], version)
	if err != nil {
		return err
	}

	if sbom != "" {
		if err := os.WriteFile(sbom, p.cycloneDX(), 0o644); err != nil {
			return err
		}
	}

	if notices != "" {
		return os.WriteFile(notices, p.notices(), 0o644)
	}

	return nil
}

// read returns what a program consists of, with the licences from the sources of its modules.
func read(file, version string) (*program, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}

	info, err := buildinfo.Read(bytes.NewReader(content))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}

	digest := sha256.Sum256(content)
	p := &program{
		name: info.Main.Path, version: version,
		arch: setting(info, "GOARCH"), sha256: hex.EncodeToString(digest[:]),
	}

	dirs, err := sources()
	if err != nil {
		return nil, err
	}

	std, err := standardLibrary(info.GoVersion, dirs)
	if err != nil {
		return nil, err
	}

	p.modules = append(p.modules, std)
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		m := module{path: d.Path, version: d.Version, sum: d.Sum}
		if m.licences, err = readLicences(dirs[d.Path]); err != nil {
			return nil, fmt.Errorf("module %s: %w", d.Path, err)
		}
		p.modules = append(p.modules, m)
	}

	return p, nil
}

func setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// sources returns the directories with the sources of modules, by path; the one of the standard library as "std".
func sources() (map[string]string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Path}}\t{{.Dir}}", "all").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}

	dirs := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, dir, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		dirs[path] = dir
	}

	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}

	dirs["std"] = strings.TrimSpace(string(root))
	return dirs, nil
}

// standardLibrary describes the part of a program that came with the compiler.
func standardLibrary(goVersion string, dirs map[string]string) (module, error) {
	m := module{path: "std", version: strings.TrimPrefix(goVersion, "go")}
	var err error
	// Distributions keep this file elsewhere. The Go project's own modules have the same one.
	if m.licences, err = readLicences(dirs["std"]); err != nil {
		m.licences, err = readLicences(dirs["golang.org/x/sys"])
	}
	return m, err
}

// The parts of CycloneDX that are written.
type (
	bom struct {
		Schema       string       `json:"$schema"`
		Format       string       `json:"bomFormat"`
		SpecVersion  string       `json:"specVersion"`
		Version      int          `json:"version"`
		Metadata     metadata     `json:"metadata"`
		Components   []component  `json:"components"`
		Dependencies []dependency `json:"dependencies"`
	}
	metadata struct {
		Component component `json:"component"`
	}
	component struct {
		Type       string          `json:"type"`
		Ref        string          `json:"bom-ref"`
		Name       string          `json:"name"`
		Version    string          `json:"version"`
		Hashes     []hash          `json:"hashes,omitempty"`
		Licences   []licenceChoice `json:"licenses,omitempty"`
		PURL       string          `json:"purl,omitempty"`
		Properties []property      `json:"properties,omitempty"`
	}
	hash struct {
		Algorithm string `json:"alg"`
		Content   string `json:"content"`
	}
	licenceChoice struct {
		Licence struct {
			ID string `json:"id"`
		} `json:"license"`
	}
	property struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	dependency struct {
		Ref       string   `json:"ref"`
		DependsOn []string `json:"dependsOn,omitempty"`
	}
)

// cycloneDX returns the bill of materials.
func (p *program) cycloneDX() []byte {
	self := component{
		Type: "application", Ref: p.name + "@" + p.version, Name: p.name, Version: p.version,
		Hashes:     []hash{{"SHA-256", p.sha256}},
		Licences:   choices([]licence{{ids: []string{"Apache-2.0"}}}),
		Properties: []property{{"go:arch", p.arch}},
	}

	b := bom{
		Schema: "http://cyclonedx.org/schema/bom-1.6.schema.json", Format: "CycloneDX", SpecVersion: "1.6", Version: 1,
		Metadata: metadata{self},
	}
	needs := dependency{Ref: self.Ref}
	for _, m := range p.modules {
		purl := "pkg:golang/" + m.path + "@" + strings.ReplaceAll(m.version, "+", "%2B")
		c := component{
			Type: "library", Ref: purl, Name: m.path, Version: m.version,
			Licences: choices(m.licences), PURL: purl,
		}
		if m.sum != "" {
			c.Properties = []property{{"go:sum", m.sum}}
		}
		b.Components = append(b.Components, c)
		needs.DependsOn = append(needs.DependsOn, purl)
	}

	b.Dependencies = []dependency{needs}

	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(b); err != nil {
		panic(err) // strings and slices only
	}

	return out.Bytes()
}

// choices returns the licences as the bill lists them, each once.
func choices(licences []licence) []licenceChoice {
	var out []licenceChoice
	seen := map[string]bool{}
	for _, l := range licences {
		for _, id := range l.ids {
			if seen[id] {
				continue
			}
			seen[id] = true
			var c licenceChoice
			c.Licence.ID = id
			out = append(out, c)
		}
	}

	return out
}

// notices returns the texts of all licences, under the names of the modules.
func (p *program) notices() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s contains the following software, under the licenses below.\n", p.name)
	for _, m := range p.modules {
		name := m.path
		if name == "std" {
			name = "Go standard library"
		}
		for _, l := range m.licences {
			fmt.Fprintf(&b, "\n%s\n%s %s: %s\n%s\n\n", strings.Repeat("=", 78), name, m.version, l.file, strings.Repeat("-", 78))
			b.WriteString(strings.Trim(l.text, "\n") + "\n")
		}
	}

	return b.Bytes()
}
