package cli

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pando/internal/linux/run"
	"pando/internal/testing/testfs"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the output of commands into the documentation")

// documents are the pages with commands in them.
func documents(t *testing.T) []string {
	t.Helper()
	pages, err := filepath.Glob("../../../*.md")
	if err == nil {
		var more []string
		more, err = filepath.Glob("../../../docs/*.md")
		pages = append(pages, more...)
	}
	if err != nil || len(pages) < 5 {
		t.Fatalf("pages: %v, %v", pages, err)
	}
	return pages
}

// block is a fenced block of a page: lines[from:to] are inside.
type block struct {
	lang     string
	from, to int
}

func blocks(lines []string) []block {
	var out []block
	open := -1
	for i, l := range lines {
		lang, fence := strings.CutPrefix(l, "```")
		switch {
		case !fence:
		case open < 0:
			open = i
			out = append(out, block{lang: lang, from: i + 1})
		default:
			out[len(out)-1].to = i
			open = -1
		}
	}
	return out
}

func readPage(t *testing.T, page string) []string {
	t.Helper()
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(b), "\n")
}

var inlineCode = regexp.MustCompile("`([^`]+)`")

// TestDocumentedCommandsExist: every `pando ...` in the documentation must be a
// command, with flags that it has; in blocks also with arguments that it takes.
func TestDocumentedCommandsExist(t *testing.T) {
	found := 0
	for _, page := range documents(t) {
		lines := readPage(t, page)
		inBlock := map[int]bool{}
		for _, b := range blocks(lines) {
			for i := b.from - 1; i <= b.to; i++ {
				inBlock[i] = true
			}
			for i := b.from; i < b.to; i++ {
				text := lines[i]
				if b.lang == "console" {
					var command bool
					if text, command = strings.CutPrefix(text, "$ "); !command {
						continue
					}
				} else if b.lang != "sh" {
					continue
				}
				for _, args := range pandoCommands(text) {
					found++
					if err := parses(args, true); err != nil {
						t.Errorf("%s:%d: %s: %v", page, i+1, text, err)
					}
				}
			}
		}
		for i, l := range lines {
			if inBlock[i] {
				continue
			}
			for _, m := range inlineCode.FindAllStringSubmatch(l, -1) {
				if !strings.HasPrefix(m[1], "pando ") {
					continue
				}
				for _, args := range pandoCommands(m[1]) {
					found++
					if err := parses(args, false); err != nil {
						t.Errorf("%s:%d: `%s`: %v", page, i+1, m[1], err)
					}
				}
			}
		}
	}
	if found < 50 {
		t.Errorf("only %d commands found in the documentation: this test looks in the wrong place", found)
	}
}

// pandoCommands finds the calls of pando in a line of shell, as arguments.
func pandoCommands(line string) [][]string {
	for _, sep := range []string{"&&", "||", "|", ";", "$(", ")", "`", "&"} {
		line = strings.ReplaceAll(line, sep, "\n")
	}
	var out [][]string
	for part := range strings.Lines(line) {
		part, _, _ = strings.Cut(part, " #")
		words := strings.Fields(part)
		for len(words) > 0 && (words[0] == "sudo" || words[0] == "time" || strings.Contains(words[0], "=")) {
			words = words[1:]
		}
		if len(words) == 0 || words[0] != "pando" {
			continue
		}
		words = words[1:]
		if i := slices.IndexFunc(words, func(w string) bool {
			return strings.HasPrefix(w, ">") || strings.HasPrefix(w, "2>") || w == "<"
		}); i >= 0 {
			words = words[:i]
		}
		for i, w := range words {
			words[i] = strings.Trim(w, `'"`)
		}
		out = append(out, words)
	}
	return out
}

// parses checks a command line without running it.
func parses(args []string, withArguments bool) error {
	root := (&App{Stdout: io.Discard, Stderr: io.Discard}).root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	if len(args) > 0 && args[0] == "help" {
		c, rest, err := root.Find(args[1:])
		if err == nil && (c == root || len(rest) > 0) && len(args) > 1 {
			err = fmt.Errorf("there is no help on %q", args[1:])
		}
		return err
	}
	c, rest, err := root.Find(bareMount(args))
	if err != nil {
		return err
	}
	if c == root && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
		return fmt.Errorf("there is no command %q", rest[0])
	}
	c.InitDefaultHelpFlag()
	if err := c.ParseFlags(rest); err != nil {
		return err
	}
	if help := c.Flags().Lookup("help"); !withArguments || help != nil && help.Changed {
		return nil
	}
	return c.ValidateArgs(c.Flags().Args())
}

func TestParsesFindsMistakes(t *testing.T) {
	for line, good := range map[string]bool{
		"pando clone web a --count 3 --mount":        true,
		"pando clone web a --mount /srv/a":           true,
		"pando run web -- make test --nope":          true,
		"pando golden ls --json":                     true,
		"pando help exit-codes":                      true,
		"pando completion bash":                      true,
		"cd $(pando mount -q a) && ls --nope":        true,
		"docker export c1 | pando golden import r -": true,
		"pando clne web a":                           false,
		"pando clone web":                            false,
		"pando clone web a --cuont 3":                false,
		"pando golden frob":                          false,
		"pando help exitcodes":                       false,
		"cd $(pando mount --nope a)":                 false,
	} {
		var err error
		for _, args := range pandoCommands(line) {
			if e := parses(args, true); e != nil {
				err = e
			}
		}
		if (err == nil) != good {
			t.Errorf("%s: %v, want good = %v", line, err, good)
		}
	}
}

// TestEveryCommandIsDocumented: docs/commands.md names every verb, and some page has
// every flag, but for those of benchmarks, which --help explains.
func TestEveryCommandIsDocumented(t *testing.T) {
	var all strings.Builder
	for _, page := range documents(t) {
		all.WriteString(strings.Join(readPage(t, page), "\n"))
	}
	commands := strings.Join(readPage(t, "../../../docs/commands.md"), "\n")
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Runnable() && !c.Hidden && !c.HasSubCommands() && !strings.Contains(commands, c.CommandPath()) {
			t.Errorf("docs/commands.md does not show `%s`", c.CommandPath())
		}
		if !c.Hidden {
			c.LocalFlags().VisitAll(func(f *pflag.Flag) {
				if !f.Hidden && !strings.HasPrefix(c.CommandPath(), "pando bench") && !strings.Contains(all.String(), "--"+f.Name) {
					t.Errorf("no page tells of the flag --%s of `%s`", f.Name, c.CommandPath())
				}
			})
			for _, sub := range c.Commands() {
				walk(sub)
			}
		}
	}
	walk((&App{Stdout: io.Discard, Stderr: io.Discard}).root())
}

// TestDocumentationIsTrue runs the commands in the console blocks of each page,
// one page a shell, and compares what they print: words must be the same, and
// numbers may differ. A line "..." stands for any lines. With -update it writes
// what they print into the page.
//
// A page is run if it has a comment `<!-- run` ... `-->` with commands that
// prepare what it needs. There, /var/lib/pando, /srv, /run/pando and /etc/pando are
// directories of the test's own; in the page they have these names. After `<!-- run zfs` there is a
// zpool called tank, where there is ZFS: `make test-zfs PKGS=./internal/front/cli`.
func TestDocumentationIsTrue(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the commands of the documentation need root: run the tests as root")
	}
	bin := filepath.Join(t.TempDir(), "pando")
	if err := testfs.BuildProgram(bin); err != nil {
		t.Fatal(err)
	}
	for _, page := range documents(t) {
		lines := readPage(t, page)
		for mark, zfs := range map[string]bool{"<!-- run": false, "<!-- run zfs": true} {
			setup, runs := setupOf(lines, mark)
			if runs && (zfs || os.Getenv("PANDO_TEST_ZFS") == "") { // in its guest, only what needs it
				t.Run(filepath.Base(page), func(t *testing.T) { runPage(t, page, lines, setup, filepath.Dir(bin), zfs) })
			}
		}
	}
}

func setupOf(lines []string, mark string) (setup []string, runs bool) {
	from := slices.Index(lines, mark)
	if from < 0 {
		return nil, false
	}
	n := slices.Index(lines[from:], "-->")
	return lines[from+1 : from+n], true
}

// docHost is what the host is called on the pages.
const docHost = "host-1"

// step is a command of a page and what the page says that it prints.
type step struct {
	command  string
	from, to int // lines of output
}

func runPage(t *testing.T, page string, lines, setup []string, bin string, zfs bool) {
	top := testfs.Ext4(t, 8<<30) // so that every host chooses the same kind of pool
	// Names of the page, and where they are here.
	pool, srv := filepath.Join(top, "pool"), filepath.Join(top, "srv")
	names := []string{"/var/lib/pando", pool, "/srv", srv, "/run/pando", filepath.Join(top, "run"),
		"/etc/pando", filepath.Join(top, "etc")}
	if zfs {
		names = append(names, "tank", testfs.ZFS(t, 4<<30))
	}
	there := strings.NewReplacer(names...)
	slices.Reverse(names)
	back := strings.NewReplacer(names...)
	if err := os.Mkdir(srv, 0o755); err != nil {
		t.Fatal(err)
	}
	env := append(os.Environ(), "PANDO_POOL="+pool, "PATH="+bin+":"+os.Getenv("PATH"), "LC_ALL=C.UTF-8", "TZ=UTC",
		"GIT_CONFIG_GLOBAL="+filepath.Join(top, "gitconfig"))
	t.Cleanup(func() {
		c := exec.Command(filepath.Join(bin, "pando"), "deinit", "--force", "--lose-keys")
		c.Env = env
		if out, err := c.CombinedOutput(); err != nil && !bytes.Contains(out, []byte("there is no pool")) {
			t.Errorf("cleaning up: %v\n%s", err, out)
		}
	})
	var steps []step
	for _, b := range blocks(lines) {
		if b.lang != "console" {
			continue
		}
		for i := b.from; i < b.to; i++ {
			if c, ok := strings.CutPrefix(lines[i], "$ "); ok {
				steps = append(steps, step{command: c, from: i + 1})
			} else if len(steps) == 0 || steps[len(steps)-1].from < b.from {
				t.Fatalf("%s:%d: output before the first command of a block", page, i+1)
			}
			steps[len(steps)-1].to = i + 1
		}
	}
	const mark = "=====next====="
	script := "echo " + docHost + " > /proc/sys/kernel/hostname; exec 2>&1; cd " + srv + "; set -e\n" +
		there.Replace(strings.Join(setup, "\n")) + "\nset +e; echo " + mark + "\n"
	for _, s := range steps {
		script += there.Replace(s.command) + "\necho; echo " + mark + "\n"
	}
	for _, program := range []string{"sqlite3", "getfattr", "mkfs.ext4", "curl"} {
		if _, err := run.Look(program); err != nil && strings.Contains(script, program) {
			t.Skipf("SKIPPED: %v", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUTS} // its own name of the host
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	parts := strings.Split(string(out), mark+"\n")
	if len(parts) != len(steps)+2 {
		t.Fatalf("the shell ended early: %v\n%s", err, out)
	}
	var fresh []string
	done := 0
	for i, s := range steps {
		got := strings.Split(strings.TrimRight(back.Replace(parts[i+1]), "\n"), "\n")
		if len(got) == 1 && got[0] == "" {
			got = nil
		}
		want := lines[s.from:s.to]
		if !same(want, got) && !*update {
			t.Errorf("%s:%d: $ %s\nprints\n  %s\nand not\n  %s\n(to write it into the page: go test ./internal/front/cli -run "+
				"Documentation -update)",
				page, s.from, s.command, strings.Join(got, "\n  "), strings.Join(want, "\n  "))
		}
		fresh = append(append(fresh, lines[done:s.from]...), abridge(want, got)...)
		done = s.to
	}
	if *update {
		if err := os.WriteFile(page, []byte(strings.Join(append(fresh, lines[done:]...), "\n")), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var (
	objectID = regexp.MustCompile(`\b[0-9a-v]{26}\b`)
	bootID   = regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`)
	shortID  = regexp.MustCompile(`-old-[0-9a-v]{8}\b`)
	sumField = regexp.MustCompile(`"sum":"[0-9a-f]{8}"`)
	ageKey   = regexp.MustCompile(`\bage1[0-9a-z]{58}\b`)
	poolKey  = regexp.MustCompile(`\b` + docHost + ` [0-9a-v]{8}\b`)
	rounded  = regexp.MustCompile(`\b[0-9]+(\.[0-9]+)? ([KMGT]iB|B)(/s)?\b`)
	timeSpan = regexp.MustCompile(`\b[0-9]+ (s|min|h|d)\b`)
	digits   = regexp.MustCompile(`[0-9]+([.:][0-9]+)*`)
	spaces   = regexp.MustCompile(`[ \t]+|─+`)
)

// essence is a line without what differs from run to run.
func essence(line string) string {
	line = objectID.ReplaceAllString(line, "ID")
	line = shortID.ReplaceAllString(line, "-old-ID")
	line = bootID.ReplaceAllString(line, "BOOT")
	line = sumField.ReplaceAllString(line, "SUM")
	line = ageKey.ReplaceAllString(line, "AGE")
	line = poolKey.ReplaceAllString(line, docHost+" ID")
	line = rounded.ReplaceAllString(line, "SIZE")
	line = timeSpan.ReplaceAllString(line, "SPAN")
	line = digits.ReplaceAllString(line, "N")
	return strings.TrimSpace(spaces.ReplaceAllString(line, " "))
}

// same compares output line by line.
func same(want, got []string) bool {
	i := slices.Index(want, "...")
	if i >= 0 {
		after := want[i+1:]
		return len(got) >= i+len(after) && same(want[:i], got[:i]) && same(after, got[len(got)-len(after):])
	}
	return slices.EqualFunc(want, got, func(a, b string) bool { return essence(a) == essence(b) })
}

// abridge leaves out of got what the page leaves out.
func abridge(want, got []string) []string {
	i := slices.Index(want, "...")
	if i < 0 || len(got) < len(want) {
		return got
	}
	out := append(slices.Clone(got[:i]), "...")
	return append(out, got[len(got)-(len(want)-i-1):]...)
}

func TestSame(t *testing.T) {
	for _, c := range []struct {
		want, got string
		same      bool
	}{
		{"web@1", "web@1", true},
		{"room 19.8 GiB free of 19.9 GiB", "room   1.8 MiB free of 3 B", true},
		{"id  copgvq3j7l3va2ehi7bu45osmk", "id  0opgvq3j7l3va2ehi7bu45osm1", true},
		{"host-1 fqobbcka (this pool)  recipient  age1z0fh5lnawg68u7ng6ag7k6paf7807a9s3rprx88w0neq4xmgaywsj4tmmm",
			"host-1 1h293h82 (this pool)  recipient  age19dwmtlcwsnhlayv4rk9n9jzhyq6skfrym30sc5f6y8fpelc2xcmq4ckw2n", true},
		{"web.pando-old-dvq2uosl", "web.pando-old-0000uosl", true},
		{"created 2026-11-20 11:10:34 (1 s ago)", "created 2027-01-02 03:04:05 (2 min ago)", true},
		{"a\n...\nz", "a\nb\nc\nz", true},
		{"a\n...\nz", "a\nb\nc", false},
		{"a\nb", "a", false},
		{"one  mounted", "one  idle", false},
	} {
		if got := same(strings.Split(c.want, "\n"), strings.Split(c.got, "\n")); got != c.same {
			t.Errorf("%q and %q: same = %v", c.want, c.got, got)
		}
	}
}
