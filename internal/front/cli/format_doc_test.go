package cli

import (
	"database/sql"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pando/internal/api"
	"pando/internal/driver"
	"pando/internal/engine/catalog"
	"pando/internal/engine/pool"
)

// TestFormatsAreDocumented: FORMAT.md has every field that is written to disk.
func TestFormatsAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../../FORMAT.md")
	if err != nil {
		t.Fatal(err)
	}
	// section is the text under a heading, up to the next of any level.
	section := func(title string) string {
		_, rest, found := strings.Cut(string(b), "# "+title+"\n")
		if !found {
			t.Errorf("FORMAT.md has no section %q", title)
		}
		text, _, _ := strings.Cut(rest, "\n#")
		return text
	}
	has := func(title, field string) {
		if !strings.Contains(section(title), "`"+field+"`") {
			t.Errorf("FORMAT.md, section %q, does not tell of %q", title, field)
		}
	}
	var fields func(title, prefix string, typ reflect.Type)
	fields = func(title, prefix string, typ reflect.Type) {
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			if name == "-" {
				continue // is not written
			}
			has(title, prefix+name)
			if sub := typ.Field(i).Type; sub.Kind() == reflect.Pointer {
				fields(title, prefix+name+".", sub.Elem())
			}
		}
	}
	fields("pool.json", "", reflect.TypeFor[pool.Config]())
	fields("Identities", "", reflect.TypeFor[driver.Identity]())

	dir := t.TempDir()
	if err := catalog.Create(t.Context(), dir, string(driver.NewID()), api.EventInit); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", filepath.Join(dir, "catalog.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.Query("SELECT m.name, c.name FROM sqlite_schema m, pragma_table_info(m.name) c WHERE m.type = 'table'")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	columns := 0
	for rows.Next() {
		var table, column string
		if err := rows.Scan(&table, &column); err != nil {
			t.Fatal(err)
		}
		if table == "goldens" || table == "objects" { // the others are records of operations
			columns++
			has(table, column)
		}
	}
	if err := rows.Err(); err != nil || columns < 30 {
		t.Errorf("%d columns found, %v", columns, err)
	}
}
