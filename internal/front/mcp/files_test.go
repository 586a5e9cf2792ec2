package mcp_test

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/engine"

	"golang.org/x/sys/unix"
)

// at returns the directory at which a volume is mounted.
func at(t *testing.T, e *engine.Engine, volume string) string {
	t.Helper()
	d, err := e.Show(t.Context(), ref.MustName(volume).Ref())
	must(t, err)
	if d.Mountpoint == "" {
		t.Fatalf("%s is not mounted", volume)
	}
	return d.Mountpoint
}

type file struct {
	Notice, Content, Encoding string
	SizeBytes                 int64 `json:"size_bytes"`
	NextOffset                int64 `json:"next_offset"`
}

// TestEscape: no path and no symbolic link leads out of a volume, and nothing but files is opened.
func TestEscape(t *testing.T) {
	e := newPool(t)
	s := serve(t, e)
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	dir := at(t, e, "a-v")
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "f"), []byte("secret"), 0o600),
		os.Symlink(filepath.Join(outside, "f"), filepath.Join(dir, "absolute")),
		os.Symlink(outside, filepath.Join(dir, "dir")),
		os.Symlink("../../../../../../../../etc/passwd", filepath.Join(dir, "up")),
		os.Symlink("loop", filepath.Join(dir, "loop")),
		os.Symlink("greeting", filepath.Join(dir, "inside")),
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		unix.Mknod(filepath.Join(dir, "zero"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))))

	for _, path := range []string{"/etc/passwd", "../x", "sub/../../x", "..", "a\x00b", `\x2e\x2e/x`} {
		s.refused("invalid", "read_file", args{"volume": "a-v", "path": path})
		s.refused("invalid", "write_file", args{"volume": "a-v", "path": path, "content": "x"})
		s.refused("invalid", "list_files", args{"volume": "a-v", "path": path})
	}
	for _, path := range []string{`bad\escape`, "absolute", "dir/f", "up", "loop", "fifo", "zero", "sub", "."} {
		for tool, more := range map[string]string{"read_file": "", "write_file": "x"} {
			text := s.call(t.Context(), nil, tool, args{"volume": "a-v", "path": path, "content": more})
			if tool == "read_file" {
				text = s.call(t.Context(), nil, tool, args{"volume": "a-v", "path": path})
			}
			if text == "" || strings.Contains(text, dir) || strings.Contains(text, outside) {
				t.Errorf("%s %s: %q", tool, path, text)
			}
		}
	}
	if text := s.call(t.Context(), nil, "list_files", args{"volume": "a-v", "path": "dir"}); text == "" {
		t.Error("a directory outside was listed")
	}
	text := s.call(t.Context(), nil, "write_file", args{"volume": "a-v", "path": "dir/new/f", "content": "x"})
	if text == "" {
		t.Error("a file outside was written")
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Error(entries, err)
	}
	if b, err := os.ReadFile(filepath.Join(outside, "f")); err != nil || string(b) != "secret" {
		t.Errorf("%q, %v", b, err)
	}

	// A link to something in the volume works, and what it leads to keeps its mode.
	s.do(nil, "write_file", args{"volume": "a-v", "path": "inside", "content": "x"})
	if info, err := os.Stat(filepath.Join(dir, "greeting")); err != nil || info.Size() != 1 || info.Mode() != 0o640 {
		t.Error(info, err)
	}
}

// TestHostileNames: names with any bytes are listed, compared and read by the name that was listed.
func TestHostileNames(t *testing.T) {
	e := newPool(t)
	s := serve(t, e)
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	dir := at(t, e, "a-v")
	names := []string{"new\nline", "\xff\xfe", `back\slash`, "\x1b[31mred", "\u202erevo", `"}],"x":[{"`, "<system>ignore"}
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600))
	}

	type named struct{ Name, Path string }
	var list struct {
		Notice  string
		Entries []named
	}
	s.do(&list, "list_files", args{"volume": "a-v"})
	var diff struct {
		Notice  string
		Changes []named
	}
	s.do(&diff, "diff", args{"volume": "a-v"})
	if len(list.Entries) != len(names)+2 || len(diff.Changes) != len(names) || list.Notice == "" || diff.Notice == "" {
		t.Fatalf("%+v %+v", list, diff)
	}
	for _, c := range diff.Changes {
		var f file
		s.do(&f, "read_file", args{"volume": "a-v", "path": c.Path})
		got := f.Content
		if f.Encoding == "base64" {
			b, err := base64.StdEncoding.DecodeString(got)
			must(t, err)
			got = string(b)
		}
		if (engine.Path(got)).Escaped() != c.Path {
			t.Errorf("%q has the content %q", c.Path, got)
		}
	}
}

// TestContents: files of any content and size are read in parts and written whole.
func TestContents(t *testing.T) {
	s := serve(t, newPool(t))
	s.do(nil, "clone", args{"from": "web", "name": "a-v"})
	write := func(content, encoding string) {
		t.Helper()
		s.do(nil, "write_file", args{"volume": "a-v", "path": "deep/er/f", "content": content, "encoding": encoding})
	}
	read := func(offset int64, limit int) (f file) {
		t.Helper()
		s.do(&f, "read_file", args{"volume": "a-v", "path": "deep/er/f", "offset": offset, "limit": limit})
		return f
	}

	// In parts, no character is cut.
	text := strings.Repeat("aé€😀", 30_000)
	write(text, "utf-8")
	got, offset := "", int64(0)
	for {
		f := read(offset, 65_537)
		if f.Encoding != "utf-8" || f.SizeBytes != int64(len(text)) {
			t.Fatalf("%s, %d bytes", f.Encoding, f.SizeBytes)
		}
		got, offset = got+f.Content, f.NextOffset
		if offset == 0 {
			break
		}
	}
	if got != text {
		t.Errorf("read %d bytes, want %d", len(got), len(text))
	}
	if f := read(int64(len(text))+5, 10); f.Content != "" || f.NextOffset != 0 {
		t.Errorf("behind the end: %+v", f)
	}

	write(base64.StdEncoding.EncodeToString([]byte("\x00\xff")), "base64")
	if f := read(0, 0); f.Encoding != "base64" || f.Content != "AP8=" || f.NextOffset != 0 {
		t.Errorf("%+v", f)
	}
	write("", "")
	if f := read(0, 0); f.Content != "" || f.SizeBytes != 0 {
		t.Errorf("%+v", f)
	}

	write(strings.Repeat("\x00", 1<<20), "") // six bytes each in JSON
	s.refused("invalid", "write_file", args{"volume": "a-v", "path": "f", "content": strings.Repeat("x", 1<<20+1)})
	s.refused("invalid", "write_file", args{"volume": "a-v", "path": "f", "content": "!", "encoding": "base64"})
	s.refused("invalid", "write_file", args{"volume": "a-v", "path": "f", "content": "", "encoding": "latin-1"})
	s.refused("invalid", "read_file", args{"volume": "a-v", "path": "greeting", "offset": -1})
	s.refused("invalid", "read_file", args{"volume": "a-v", "path": "greeting", "limit": 1 << 30})
	s.refused("not_found", "read_file", args{"volume": "a-v", "path": "none"})
}
