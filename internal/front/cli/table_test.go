package cli

import (
	"bytes"
	"testing"
)

// TestTable: columns are as wide as their widest cell in letters, and the last has
// no blanks behind it.
func TestTable(t *testing.T) {
	var out bytes.Buffer
	table := (&App{Stdout: &out}).table("NAME", "FS", "WHERE")
	table.row("täg", "a much longer cell than the blanks that are written at once", "")
	table.row("x", "", "/mnt")
	if err := table.flush(); err != nil {
		t.Fatal(err)
	}
	want := "" +
		"NAME  FS                                                           WHERE\n" +
		"täg   a much longer cell than the blanks that are written at once  \n" +
		"x                                                                  /mnt\n"
	if out.String() != want {
		t.Errorf("printed\n%swanted\n%s", out.String(), want)
	}
}
