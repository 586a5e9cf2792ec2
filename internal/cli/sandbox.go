package cli

import (
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"pando/internal/base/errs"
	"pando/internal/engine"

	"github.com/spf13/cobra"
)

// sandboxFlags adds the options of commands that can run a program in a sandbox. The returned function reads them.
func sandboxFlags(c *cobra.Command, op string) func() (engine.Sandbox, error) {
	var s engine.Sandbox
	var memory string
	f := c.Flags()
	f.BoolVar(&s.Root, "root", false, "run in a sandbox whose root filesystem is the clone")
	f.StringVar(&s.Bind, "bind", "", "run in a sandbox with programs of this host, and the clone at `PATH`")
	f.StringArrayVar(&s.Show, "show", nil, "show the sandbox `PATH` of this host, read-only (repeatable)")
	f.StringVar(&s.Net, "net", "", "`NETWORK` of the sandbox: none or host (default none)")
	f.StringVar(&s.User, "user", "", "run as `USER[:GROUP]` of the sandbox, names or numbers (default: your own)")
	f.StringVar(&s.Workdir, "workdir", "", "start in `DIR` of the sandbox (default: the clone)")
	f.StringVar(&memory, "memory", "", "limit the sandbox to `SIZE` of memory, such as 512M")
	f.Float64Var(&s.Limits.CPUs, "cpus", 0, "limit the sandbox to `N` processors, such as 1.5")
	f.IntVar(&s.Limits.PIDs, "pids", 0, "limit the sandbox to `N` processes and threads")

	_ = c.RegisterFlagCompletionFunc("net", cobra.FixedCompletions([]string{engine.NetNone, engine.NetHost},
		cobra.ShellCompDirectiveNoFileComp))
	_ = c.MarkFlagDirname("show")
	for _, name := range []string{"user", "memory", "cpus", "pids"} {
		_ = c.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}

	return func() (engine.Sandbox, error) {
		if f.Changed("bind") && s.Bind == "" { // the variable of a script was empty
			return s, errs.New(errs.Invalid, op, "", "--bind must not be empty").WithHint("use a path, such as --bind /work")
		}
		if f.Changed("user") && s.User == "" { // it would be root
			return s, errs.New(errs.Invalid, op, "", "--user must not be empty").
				WithHint("use a name or a number, such as --user 1000")
		}
		for _, name := range []string{"cpus", "pids"} {
			if f.Changed(name) && f.Lookup(name).Value.String() == "0" {
				return s, errs.New(errs.Invalid, op, "", "--%s must be greater than 0", name)
			}
		}

		if memory == "" {
			return s, nil
		}
		bytes, err := parseSize(op, memory)
		s.Limits.MemoryBytes = bytes
		return s, err
	}
}

// sandboxPath is the PATH of a program in a sandbox.
const sandboxPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// sandboxEnv returns the environment of a program in a sandbox: nothing of this process's but the terminal and the
// language, and what the user adds: NAME=VALUE, or NAME with the value that it has here.
func sandboxEnv(added []string) ([]string, error) {
	env := []string{sandboxPath}
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "LC_") || slices.Contains([]string{"TERM", "COLORTERM", "LANG", "LANGUAGE", "TZ"}, name) {
			env = append(env, entry)
		}
	}
	return addEnv(env, added)
}

// addEnv adds variables of --env to an environment.
func addEnv(env, added []string) ([]string, error) {
	for _, entry := range added {
		name, _, has := strings.Cut(entry, "=")
		if name == "" {
			return nil, errs.New(errs.Invalid, "run", entry, "--env needs a name").
				WithHint("use --env NAME=VALUE, or --env NAME for a variable that pando has")
		}
		if !has {
			value, set := os.LookupEnv(name)
			if !set {
				return nil, errs.New(errs.NotFound, "run", name, "this variable is not set").
					WithHint("give it a value: --env %s=VALUE", name)
			}
			entry = name + "=" + value
		}
		env = slices.DeleteFunc(env, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		env = append(env, entry)
	}
	return env, nil
}

// sandboxSignals receives the signals that a program in a sandbox gets. Ctrl-Z in a terminal is not among them: the
// sandbox has a terminal of its own.
func sandboxSignals() (arriving <-chan os.Signal, stop func()) {
	c := make(chan os.Signal, 16)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
		syscall.SIGWINCH, syscall.SIGTSTP)
	return c, func() { signal.Stop(c) }
}

// suspend stops this process until it is continued.
func suspend() { _ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) }
