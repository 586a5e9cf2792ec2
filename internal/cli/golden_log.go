package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"unicode/utf8"

	"pando/internal/base/errs"
	"pando/internal/base/ref"
	"pando/internal/engine"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

func (a *App) goldenLogCommand() *cobra.Command {
	var q engine.BuildLogRequest
	var raw bool
	c := &cobra.Command{
		Use:   "log GOLDEN[@N]",
		Short: "Show what the command printed that built a generation",
		Long: `Show what the command of a build printed, both its standard output and its
standard error: by default that of the newest generation of GOLDEN that a command
has built. The first 16 MiB are kept as long as the generation. --failed shows
the last build that failed; with --key also one that was interrupted, or is still
running. A pool keeps 64 logs of builds that failed.

On a terminal, pando shows colors, and makes other control characters visible,
which could change the terminal. Elsewhere it prints the log as it is.`,
		Example: `  pando golden log deps
  pando golden log deps@3
  pando golden log deps --failed`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeGoldens,
		RunE: a.withPool(func(ctx context.Context, e *engine.Engine, args []string) (err error) {
			if q.Golden, err = ref.Parse("golden log", args[0]); err != nil {
				return err
			}
			if q.Golden.At != "" && (q.Key != "" || q.Failed) {
				return errs.New(errs.Invalid, "golden log", args[0], "a generation cannot be combined with --key or --failed").
					WithHint("remove @%s", q.Golden.At)
			}
			if a.json {
				return errs.New(errs.Invalid, "golden log", args[0], "a log is not JSON").WithHint("remove --json")
			}

			f, err := e.BuildLog(ctx, q)
			if err != nil {
				return err
			}
			defer f.Close()

			var from io.Reader = f
			if out, ok := a.Stdout.(*os.File); ok && term.IsTerminal(int(out.Fd())) && !raw {
				from = &visible{from: f}
			}
			_, err = io.Copy(a.Stdout, from)
			return a.written(err)
		}),
	}

	c.Flags().StringVar(&q.Key, "key", "", "show the log of the build with this `KEY`")
	c.Flags().BoolVar(&q.Failed, "failed", false, "show the last build that failed")
	c.Flags().BoolVar(&raw, "raw", false, "print all control characters to a terminal, too")
	return c
}

// visible makes the control characters of a text visible, except colors and those that only begin lines or columns.
type visible struct {
	from io.Reader
	rest []byte // not looked at yet
	out  []byte // not read yet
	err  error
}

// maxColor limits the length of a sequence that sets colors.
const maxColor = 32

func (v *visible) Read(b []byte) (int, error) {
	for len(v.out) == 0 {
		if v.err != nil && len(v.rest) == 0 {
			return 0, v.err
		}
		if v.err == nil {
			chunk := make([]byte, 32<<10)
			var n int
			n, v.err = v.from.Read(chunk)
			v.rest = append(v.rest, chunk[:n]...)
		}
		v.convert()
	}

	n := copy(b, v.out)
	v.out = v.out[n:]
	return n, nil
}

// convert moves as much as possible from rest to out. What may continue stays, unless the text has ended.
func (v *visible) convert() {
	for len(v.rest) > 0 {
		c := v.rest[0]
		n := 1
		switch {
		case c == '\n' || c == '\t' || c == '\r' || c >= ' ' && c < 0x7f:
		case c == 0x1b:
			if n = colorLength(v.rest); n == 0 {
				if v.err == nil && len(v.rest) < maxColor {
					return
				}
				v.escape(1)
				continue
			}
		case c >= utf8.RuneSelf:
			if v.err == nil && !utf8.FullRune(v.rest) {
				return
			}
			r, size := utf8.DecodeRune(v.rest)
			if r == utf8.RuneError || r >= 0x80 && r < 0xa0 {
				v.escape(size)
				continue
			}
			n = size
		default:
			v.escape(1)
			continue
		}
		v.out, v.rest = append(v.out, v.rest[:n]...), v.rest[n:]
	}
}

// escape writes the first n bytes in a visible form.
func (v *visible) escape(n int) {
	for _, c := range v.rest[:n] {
		v.out = fmt.Appendf(v.out, `\x%02x`, c)
	}
	v.rest = v.rest[n:]
}

// colorLength returns the length of the sequence at the beginning of b that sets colors; 0 if it is none, or not whole.
func colorLength(b []byte) int {
	if len(b) < 3 || b[1] != '[' {
		return 0
	}
	for i, c := range b[2:min(len(b), maxColor)] {
		switch {
		case c == 'm':
			return i + 3
		case c != ';' && c != ':' && (c < '0' || c > '9'):
			return 0
		}
	}
	return 0
}
