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
	"sync"
	"time"

	"pando/test/servers/internal/serve"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
	"github.com/versity/versitygw/s3response"
)

// store is versitygw's own store of files, made as consistent as S3. By itself
// (1.8.0) it looks at the ETag and at the content of an object one after the other, so
// that who reads while it is replaced may get the old ETag with the new content; it
// lists the temporary names of files that are being replaced; and a PUT with If-Match
// and a DELETE of the same object at once may both succeed and leave the object. All
// of that it does correctly if the moment in which an object changes is one.
type store struct {
	*posix.Posix
	change sync.RWMutex
}

func (s *store) PutObject(ctx context.Context, in s3response.PutObjectInput) (s3response.PutObjectOutput, error) {
	arrived := false

	// What is called here is between the arrival of the content and the look at the
	// condition.
	out, err := s.PutObjectWithPostFunc(ctx, in, func(*os.File) error {
		s.change.Lock()
		arrived = true
		return nil
	})

	if arrived {
		s.change.Unlock()
	}

	return out, err
}

func (s *store) DeleteObject(ctx context.Context, in *s3.DeleteObjectInput) (*s3.DeleteObjectOutput, error) {
	s.change.Lock()
	defer s.change.Unlock()
	return s.Posix.DeleteObject(ctx, in)
}

func (s *store) HeadObject(ctx context.Context, in *s3.HeadObjectInput) (*s3.HeadObjectOutput, error) {
	s.change.RLock()
	defer s.change.RUnlock()
	return s.Posix.HeadObject(ctx, in)
}

func (s *store) GetObject(ctx context.Context, in *s3.GetObjectInput) (*s3.GetObjectOutput, error) {
	s.change.RLock()
	defer s.change.RUnlock()
	return s.Posix.GetObject(ctx, in)
}

func (s *store) ListObjectsV2(ctx context.Context, in *s3.ListObjectsV2Input) (s3response.ListObjectsV2Result, error) {
	s.change.RLock()
	defer s.change.RUnlock()
	return s.Posix.ListObjectsV2(ctx, in)
}

func main() {
	serve.UntilClosed()
	if len(os.Args) != 5 {
		panic("versitygw DIRECTORY ACCOUNTS ACCESS SECRET")
	}

	files, err := posix.New(os.Args[1], meta.XattrMeta{}, posix.PosixOpts{})
	if err != nil {
		serve.Fail(err)
	}

	// It wants to open its port itself, so this one is free only with a gap: where
	// another took it in the meantime, whoever started this tries again.
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

	serve.Fail(embedgw.RunVersityGW(context.Background(), &store{Posix: files}, &embedgw.Config{
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
