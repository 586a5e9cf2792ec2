package account_test

import (
	"os"
	"path/filepath"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/base/principal"
	"pando/internal/linux/account"
	"pando/internal/testing/testfs"
)

// TestParseOwner: users and groups are found in the files of this host, and in whatever else getent reads.
func TestParseOwner(t *testing.T) {
	bin := t.TempDir()
	getent := `#!/bin/sh
case "$1 $2" in
"passwd ldap-user"|"passwd 70001") echo "ldap-user:*:70001:70002:A user:/home/u:/bin/sh" ;;
"group ldap-group") echo "ldap-group:*:70003:ldap-user" ;;
"passwd broken") echo "broken" ;;
*) exit 2 ;;
esac
`
	if err := testfs.WriteProgram(filepath.Join(bin, "getent"), []byte(getent)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))

	for text, want := range map[string]struct {
		owner principal.Owner
		kind  errs.Kind
	}{
		"root":                 {owner: principal.Owner{}},
		"daemon":               {owner: principal.Owner{UID: 1, GID: 1}},
		"1":                    {owner: principal.Owner{UID: 1, GID: 1}},
		"daemon:root":          {owner: principal.Owner{UID: 1}},
		"4000000000:17":        {owner: principal.Owner{UID: 4000000000, GID: 17}},
		"ldap-user":            {owner: principal.Owner{UID: 70001, GID: 70002}},
		"70001:ldap-group":     {owner: principal.Owner{UID: 70001, GID: 70003}},
		"4000000000":           {kind: errs.Invalid}, // no group is known
		"nobody-knows":         {kind: errs.NotFound},
		"root:nobody-knows":    {kind: errs.NotFound},
		"broken":               {kind: errs.NotFound},
		"":                     {kind: errs.Invalid},
		":":                    {kind: errs.Invalid},
		"root:":                {kind: errs.Invalid},
		"root:daemon:x":        {kind: errs.Invalid},
		"-1":                   {kind: errs.Invalid},
		"4294967295:0":         {kind: errs.Invalid}, // the kernel's "none"
		"4294967296:0":         {kind: errs.Invalid},
		"99999999999999999999": {kind: errs.Invalid},
	} {
		got, err := account.ParseOwner(t.Context(), "mount", text)
		if err != nil && errs.KindOf(err) != want.kind || err == nil && (want.kind != "" || got != want.owner) {
			t.Errorf("%q: %+v, %v; want %+v", text, got, err, want)
		}
	}
}
