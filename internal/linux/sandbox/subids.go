package sandbox

import (
	"bufio"
	"context"
	"errors"
	"io/fs"
	"os"
	osuser "os/user"
	"strconv"
	"strings"

	"pando/internal/base/errs"

	"golang.org/x/sys/unix"
)

// RootNamespace returns the IDs of a user namespace in which a user is root, and in which the IDs from 1 are those
// of its ranges in /etc/subuid and /etc/subgid, if it has both.
func RootNamespace(uid, gid int) (*UserNS, error) {
	uids, err := subordinate("/etc/subuid", uid)
	if err != nil {
		return nil, err
	}

	gids, err := subordinate("/etc/subgid", uid)
	if err != nil {
		return nil, err
	}

	root := func(id int) IDMap { return IDMap{Inside: 0, Host: id, Size: 1} }
	if len(uids) == 0 || len(gids) == 0 {
		return &UserNS{UIDs: []IDMap{root(uid)}, GIDs: []IDMap{root(gid)}}, nil
	}

	return &UserNS{Helpers: true, UIDs: append([]IDMap{root(uid)}, uids...),
		GIDs: append([]IDMap{root(gid)}, gids...)}, nil
}

// subordinate returns the ranges that a file such as /etc/subuid gives to a user, as IDs from 1 in a namespace.
func subordinate(file string, uid int) ([]IDMap, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, errs.Wrap(opSandbox, file, err)
	}

	defer f.Close()

	names := map[string]bool{strconv.Itoa(uid): true}
	if u, err := osuser.LookupId(strconv.Itoa(uid)); err == nil {
		names[u.Username] = true
	}

	var out []IDMap
	next := 1
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		f := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(f) != 3 || !names[f[0]] {
			continue
		}
		first, err1 := strconv.Atoi(f[1])
		size, err2 := strconv.Atoi(f[2])
		if err1 != nil || err2 != nil || first <= 0 || size <= 0 {
			continue // newuidmap ignores it as well
		}
		out = append(out, IDMap{Inside: next, Host: first, Size: size})
		next += size
	}

	return out, errs.Wrap(opSandbox, file, lines.Err())
}

// RemoveAsRoot removes a directory in a user namespace in which this user is root: files in it may belong to its
// subordinate IDs. The kinds of Run; Permission if the user has no such IDs, or something belongs to others.
func RemoveAsRoot(ctx context.Context, path string) error {
	ids, err := RootNamespace(os.Geteuid(), os.Getegid())
	if err != nil {
		return err
	}
	if !ids.Helpers {
		return errs.New(errs.Permission, "remove", path, "it has files of other users").WithHint("run it as root")
	}

	r, err := Run(ctx, Spec{
		Command: []string{"rm", "-rf", "--one-file-system", "--", path}, Env: []string{"PATH=/usr/bin:/bin"}, Dir: "/",
		HostNet: true, UserNS: ids, Capabilities: []int{unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER},
	}, Options{})
	if err != nil || r.Exit == 0 {
		return err
	}
	return errs.New(errs.Permission, "remove", path, "some of its files belong to others than your subordinate users").
		WithHint("run it as root")
}
