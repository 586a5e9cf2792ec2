package cli

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

const (
	pictureSource = "../../../docs/terminal.md"
	pictureFile   = "../../../docs/img/terminal.svg"
)

// TestPicture compares the text in the README's picture with the session it shows, which TestDocumentationIsTrue runs.
// With -update it draws the picture.
func TestPicture(t *testing.T) {
	session := firstConsole(t, readPage(t, pictureSource))

	if *update {
		if err := os.WriteFile(pictureFile, drawTerminal(session), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	picture, err := os.ReadFile(pictureFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(picture, drawTerminal(session)) {
		t.Errorf("%s does not show the session of %s: draw it with -update", pictureFile, pictureSource)
	}
}

// TestDrawTerminal: special characters are escaped, and each line is there once.
func TestDrawTerminal(t *testing.T) {
	session := []string{"$ echo '<&>'", "<&>", "", "└─ fix"}
	var doc struct {
		Text struct {
			Spans []string `xml:"tspan"`
		} `xml:"text"`
	}

	if err := xml.Unmarshal(drawTerminal(session), &doc); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(doc.Text.Spans, session) {
		t.Errorf("the picture shows %q, want %q", doc.Text.Spans, session)
	}
}

// firstConsole returns the lines of the first console block of a page.
func firstConsole(t *testing.T, lines []string) []string {
	t.Helper()
	for _, b := range blocks(lines) {
		if b.lang == "console" {
			return lines[b.from:b.to]
		}
	}
	t.Fatalf("%s has no console block", pictureSource)
	return nil
}

// drawTerminal draws a session as an SVG: commands, which begin with "$ ", stand out from what they print.
func drawTerminal(session []string) []byte {
	const (
		charWidth  = 8.4 // of a monospaced font of 14 pixels
		lineHeight = 20
		margin     = 16
		bar        = 28 // with the buttons of the window
	)

	columns := 80
	for _, line := range session {
		columns = max(columns, len([]rune(line)))
	}
	width := 2*margin + int(charWidth*float64(columns))
	height := bar + 2*margin + lineHeight*len(session)

	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d">`+"\n",
		width, height, width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" rx="8" fill="#1b1f24"/>`+"\n", width, height)
	for i, colour := range []string{"#ff5f57", "#febc2e", "#28c840"} {
		fmt.Fprintf(&out, `<circle cx="%d" cy="%d" r="5" fill="%s"/>`+"\n", margin+4+18*i, bar/2+2, colour)
	}

	out.WriteString(`<text xml:space="preserve" font-size="14"` +
		` font-family="ui-monospace, Menlo, Consolas, monospace">` + "\n")
	for i, line := range session {
		colour := "#adbac7"
		if strings.HasPrefix(line, "$ ") {
			colour = "#6cb6ff"
		}
		fmt.Fprintf(&out, `<tspan x="%d" y="%d" fill="%s">`, margin, bar+margin+lineHeight*i+14, colour)
		xml.EscapeText(&out, []byte(line))
		out.WriteString("</tspan>\n")
	}
	out.WriteString("</text>\n</svg>\n")
	return out.Bytes()
}
