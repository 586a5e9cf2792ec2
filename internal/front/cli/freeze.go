package cli

import (
	"errors"
	"strconv"

	"pando/internal/engine"

	"github.com/spf13/pflag"
)

// freezeFlags adds the flags that say whether the writes to a volume in use are stopped.
func freezeFlags(f *pflag.FlagSet, to *engine.Freeze) {
	f.VarPF(&freezeFlag{to, engine.FreezeAlways}, "freeze", "",
		"briefly hold back writes to a volume in use, so that the copy is one point in time even for unsynced data").
		NoOptDefVal = "true"
	f.VarPF(&freezeFlag{to, engine.FreezeNever}, "no-freeze", "",
		"do not hold back writes, except to ephemeral overlays; the copy is what a power loss would leave").
		NoOptDefVal = "true"
}

// freezeFlag is one of two flags that set the same value, and exclude each other.
type freezeFlag struct {
	to    *engine.Freeze
	value engine.Freeze
}

// Set implements pflag.Value.
func (v *freezeFlag) Set(s string) error {
	on, err := strconv.ParseBool(s)
	switch {
	case err != nil:
		return err
	case !on && *v.to == v.value:
		*v.to = engine.FreezeIfNeeded
	case on && *v.to != engine.FreezeIfNeeded && *v.to != v.value:
		return errors.New("--freeze and --no-freeze cannot be combined")
	case on:
		*v.to = v.value
	}

	return nil
}

// String implements pflag.Value.
func (v *freezeFlag) String() string { return strconv.FormatBool(v.to != nil && *v.to == v.value) }

// Type implements pflag.Value.
func (v *freezeFlag) Type() string { return "bool" }
