// Command gitlab is GitLab Runner with the custom executor and nothing else: the other executors need modules that a
// test of examples/ci does not.
package main

import (
	"os"

	"github.com/sirupsen/logrus"
	"github.com/urfave/cli"

	_ "gitlab.com/gitlab-org/gitlab-runner/commands"
	"gitlab.com/gitlab-org/gitlab-runner/common"
	_ "gitlab.com/gitlab-org/gitlab-runner/executors/custom"
	_ "gitlab.com/gitlab-org/gitlab-runner/shells"
)

func main() {
	app := cli.NewApp()
	app.Commands = common.GetCommands()
	if err := app.Run(os.Args); err != nil {
		logrus.Fatal(err)
	}
}
