package cli

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestVisible: only colors and text reach a terminal, however the log is read.
func TestVisible(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "",
		"plain\ttext\r\n":                  "plain\ttext\r\n",
		"\x1b[1;31mred\x1b[0m":             "\x1b[1;31mred\x1b[0m",
		"\x1b[38:2::1:2:3mx":               "\x1b[38:2::1:2:3mx",
		"a\x1b]52;c;aGk=\x07b":             `a\x1b]52;c;aGk=\x07b`,
		"\x1b[2J\x1b[H":                    `\x1b[2J\x1b[H`,
		"\x1b":                             `\x1b`,
		"\x1b[31":                          `\x1b[31`,
		"\x00\x08\x7f":                     `\x00\x08\x7f`,
		"é€😀":                              "é€😀",
		"\xff\xc3":                         `\xff\xc3`,
		"\u009b31m":                        `\xc2\x9b31m`,
		"\x1b[" + strings.Repeat("1;", 40): `\x1b[` + strings.Repeat("1;", 40),
	} {
		for name, r := range map[string]io.Reader{
			"at once": strings.NewReader(in), "in bytes": iotest.OneByteReader(strings.NewReader(in)),
			"with its end": iotest.DataErrReader(strings.NewReader(in)),
		} {
			got, err := io.ReadAll(&visible{from: r})
			if err != nil || string(got) != want {
				t.Errorf("%q, %s: got %q, want %q, %v", in, name, got, want, err)
			}
		}
	}
}
