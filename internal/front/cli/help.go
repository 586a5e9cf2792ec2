package cli

import (
	"fmt"
	"runtime"
	"strings"

	"pando/internal/api"
	"pando/internal/base/errs"
	"pando/internal/driver"

	"github.com/spf13/cobra"
)

func (a *App) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		GroupID: "tools",
		Short:   "Print the version",
		Long: `Print the version of pando, the Go version it was built with, and the platform.
With --json, also print the version of the identity files that it writes.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return a.printJSON(api.Version{Version: a.Version, Go: runtime.Version(), OS: runtime.GOOS,
					Arch: runtime.GOARCH, IdentityFormat: driver.IdentityVersion})
			}
			return a.printf("pando %s (%s, %s/%s)\n", a.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		},
	}
}

// meanings describes each kind of error, for `pando exit-codes`.
var meanings = map[errs.Kind]string{
	errs.Internal:    "an unexpected error; please report it",
	errs.Invalid:     "invalid input; nothing was changed",
	errs.NotFound:    "no such pool, volume, golden, snapshot, remote or file",
	errs.Exists:      "the name is already in use",
	errs.InUse:       "a process, a mount or another pando command uses it",
	errs.NoSpace:     "the pool or the volume is full",
	errs.Permission:  "root, a file permission or a key is missing",
	errs.Unsupported: "this host, filesystem or driver cannot do it",
	errs.Conflict:    "another process or host changed it first",
	errs.Damaged:     "stored data does not match its checksum, or is missing",
	errs.TooNew:      "written by a newer pando",
	errs.IO:          "the operating system reported an input/output error",
	errs.Canceled:    "interrupted",

	errs.CommandFailed: "a command of --prepare failed",
}

// Exit codes of commands that succeeded and report a finding. They are stable.
const (
	exitUnproven = 20
	exitWarning  = 21
	exitCritical = 22
)

// verdicts describes these exit codes.
var verdicts = []struct {
	exit        int
	verb, means string
}{
	{exitUnproven, "bench sync", "FAIL: could not prove that synced data reached the disk"},
	{exitWarning, "doctor", "the worst finding is a warning"},
	{exitCritical, "doctor", "the worst finding is critical"},
}

// Exit codes of run, as those of docker, env(1) and shells: those of its command are below.
const (
	exitPandoFailed = 125
	exitCannotStart = 126
	exitNoProgram   = 127
)

// runExits describes these exit codes.
var runExits = []struct {
	exit  int
	means string
}{
	{exitPandoFailed, "pando failed; the error has its kind, as above"},
	{exitCannotStart, "the command cannot be started, such as a file that is not executable"},
	{exitNoProgram, "there is no such command"},
	{errs.Canceled.Codes().Exit, "interrupted before the command started"},
}

func (a *App) exitCodesTopic() *cobra.Command {
	var b strings.Builder
	b.WriteString("The exit code tells which kind of error ended a command:\n\n     0  success\n")
	for _, k := range errs.Kinds() {
		fmt.Fprintf(&b, "  %4d  %-14s  %s\n", k.Codes().Exit, k, meanings[k])
	}

	b.WriteString("\n`pando run` exits with the exit code of its command, or with:\n\n")
	for _, r := range runExits {
		fmt.Fprintf(&b, "  %4d  %s\n", r.exit, r.means)
	}

	b.WriteString("\nSome commands that succeed report their result with the exit code:\n\n")
	for _, v := range verdicts {
		fmt.Fprintf(&b, "  %4d  %-14s  %s\n", v.exit, v.verb, v.means)
	}

	b.WriteString("\nWith --json, the error on standard error contains the kind:\n  " +
		"{\"error\":{\"kind\":\"not_found\",\"op\":\"show\",\"ref\":\"web\",\"message\":\"...\",\"hint\":\"...\"}}")
	return &cobra.Command{Use: "exit-codes", Short: "List exit codes and what they mean", Long: b.String()}
}

// completion
