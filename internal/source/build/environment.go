package build

import (
	"slices"
	"strings"

	"pando/internal/base/errs"
)

// standardEnv is what every command of a build finds in its environment: nothing of the caller's, so that a result
// depends only on what is declared.
var standardEnv = []string{
	"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"HOME=/root",
	"LANG=C.UTF-8",
}

// Environment returns the environment of a command: the standard variables, and declared ones, which replace those of
// the same name. A declared variable is NAME=VALUE, or NAME, which has the value that it has in caller. Invalid.
func Environment(op string, declared, caller []string) ([]string, error) {
	env := slices.Clone(standardEnv)
	for _, d := range declared {
		name, value, has := strings.Cut(d, "=")
		if err := checkVariable(op, name); err != nil {
			return nil, err
		}
		if !has {
			if value, has = lookup(caller, name); !has {
				return nil, errs.New(errs.Invalid, op, name, "the variable is not set").
					WithHint("set %s, or give its value: %s=VALUE", name, name)
			}
		}
		env = set(env, name, value)
	}
	return env, nil
}

// checkVariable refuses a name that no variable can have, or that Pando sets. Invalid.
func checkVariable(op, name string) error {
	switch {
	case name == "" || strings.ContainsAny(name, "= \t\n\x00"):
		return errs.New(errs.Invalid, op, name, "not the name of a variable")
	case strings.HasPrefix(name, "PANDO_") || name == "PWD":
		return errs.New(errs.Invalid, op, name, "pando sets this variable itself").WithHint("use another name")
	}
	return nil
}

// set returns env with a variable, instead of an earlier one of the same name.
func set(env []string, name, value string) []string {
	env = slices.DeleteFunc(env, func(entry string) bool { return strings.HasPrefix(entry, name+"=") })
	return append(env, name+"="+value)
}

// lookup returns the value of a variable.
func lookup(env []string, name string) (string, bool) {
	for _, entry := range slices.Backward(env) {
		if n, value, _ := strings.Cut(entry, "="); n == name {
			return value, true
		}
	}
	return "", false
}
