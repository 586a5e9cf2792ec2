package cli

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	pageLink = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`^#+ (.+)$`)
	notSlug  = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// TestDocumentationLinks: each link in the documentation leads to a file of the project, and to a heading that it has.
func TestDocumentationLinks(t *testing.T) {
	found := 0
	for _, page := range documents(t) {
		for _, m := range pageLink.FindAllStringSubmatch(prose(readPage(t, page)), -1) {
			to, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(to, "://") {
				continue
			}
			found++

			file := page
			if to != "" {
				file = filepath.Join(filepath.Dir(page), to)
			}
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s links to %s, which is not there", page, m[1])
				continue
			}
			if anchor != "" && !slices.Contains(anchors(readPage(t, file)), anchor) {
				t.Errorf("%s links to %s, and %s has no such heading", page, m[1], file)
			}
		}
	}
	if found < 100 {
		t.Errorf("only %d links found: this test looks in the wrong place", found)
	}
}

// TestDocumentationIndex: the index names every page.
func TestDocumentationIndex(t *testing.T) {
	pages, err := filepath.Glob("../../../docs/*.md")
	if err != nil || len(pages) < 20 {
		t.Fatalf("pages: %v, %v", pages, err)
	}
	index := prose(readPage(t, "../../../docs/README.md"))
	for _, page := range pages {
		if name := filepath.Base(page); name != "README.md" && !strings.Contains(index, "]("+name+")") {
			t.Errorf("docs/README.md does not name %s", name)
		}
	}
}

// prose returns a page without its blocks of code.
func prose(lines []string) string {
	var out []string
	from := 0
	for _, b := range blocks(lines) {
		out = append(out, lines[from:b.from]...)
		from = b.to
	}
	return strings.Join(append(out, lines[from:]...), "\n")
}

// anchors returns the names by which headings of a page can be linked to, as GitHub makes them.
func anchors(lines []string) (out []string) {
	for line := range strings.Lines(prose(lines)) {
		if m := heading.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil {
			name := notSlug.ReplaceAllString(strings.ToLower(m[1]), "")
			out = append(out, strings.ReplaceAll(name, " ", "-"))
		}
	}
	return out
}
