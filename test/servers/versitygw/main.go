// Versitygw serves the directories of a directory as buckets of S3, with
// signatures, accounts and policies, on a free port of this host:
//
//	versitygw DIRECTORY ACCOUNTS ACCESS SECRET
//
// ACCOUNTS is the directory with the file of accounts, users.json. ACCESS and
// SECRET are the keys of the user who may do everything.
package main

import (
	"context"
	"net"
	"os"
	"time"

	"pando/test/servers/internal/serve"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	serve.UntilClosed()
	if len(os.Args) != 5 {
		panic("versitygw DIRECTORY ACCOUNTS ACCESS SECRET")
	}
	store, err := posix.New(os.Args[1], meta.XattrMeta{}, posix.PosixOpts{})
	if err != nil {
		serve.Fail(err)
	}
	// It wants to open its port itself, so this one is free only with a gap: where
	// another took it meanwhile, whoever started this tries again.
	l := serve.Loopback()
	addr := l.Addr()
	l.Close()
	go func() {
		for {
			if c, err := net.Dial("tcp", addr.String()); err == nil {
				c.Close()
				serve.Listening(addr)
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	}()
	serve.Fail(embedgw.RunVersityGW(context.Background(), store, &embedgw.Config{
		RootUserAccess:    os.Args[3],
		RootUserSecret:    os.Args[4],
		Region:            "us-east-1",
		Ports:             []string{addr.String()},
		MaxConnections:    1000,
		MaxRequests:       1000,
		MultipartMaxParts: 10000,
		IAMDir:            os.Args[2],
		IAMCacheDisable:   true,
		Quiet:             true,
		KeepAlive:         true,
	}))
}
