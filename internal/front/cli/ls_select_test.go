package cli

import (
	"testing"
	"time"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/service/listing"
)

// TestLsColumns: all columns have cells, and what is no column is refused.
func TestLsColumns(t *testing.T) {
	s := lsSelection{columns: listing.ColumnNames()}
	columns, err := s.parse()
	if err != nil || len(columns) != len(s.columns) {
		t.Fatal(columns, err)
	}
	v := api.Object{Name: "v", CreatedAt: time.Now(), Ephemeral: true}
	for _, c := range columns {
		if lsCell(&c, &v) == "" {
			t.Errorf("%s is empty", c.Name)
		}
	}

	for _, bad := range [][]string{{}, {"name", ""}, {"colour"}} {
		s := lsSelection{columns: bad}
		if _, err := s.parse(); !errs.Is(err, errs.Invalid) || hintOf(err) == "" {
			t.Errorf("%+v: %v (hint %q)", s, err, hintOf(err))
		}
	}
}
