package treecopy
import ("testing";"os";"time";"fmt";"path/filepath";"golang.org/x/sys/unix";"os/exec")
func TestQuick2(t *testing.T){
 if os.Getenv("Q2")=="" {t.Skip()}
 mnt:=loopMount(t,"xfs",20000)
 i:=0
 for round:=0;round<3;round++ {
 for _,dirty:=range []bool{true,false} {
 for _,min:=range []int64{0,64<<10,1<<40} {
  i++
  src:=filepath.Join(mnt,fmt.Sprint("s",i)); os.Mkdir(src,0755)
  if out,err:=exec.Command("cp","-a","/usr/local/go/.",src).CombinedOutput();err!=nil {t.Fatal(string(out))}
  if !dirty {unix.Sync()}
  dst:=filepath.Join(mnt,fmt.Sprint("d",i)); os.Mkdir(dst,0755)
  cloneMin=min
  s:=time.Now(); copyDir(t,src,dst,Options{}); fmt.Println("dirty",dirty,"cloneMin",min,time.Since(s))
  os.RemoveAll(src); os.RemoveAll(dst)
  unix.Sync()
 }}}
}
func TestQuick3(t *testing.T){
 if os.Getenv("Q3")=="" {t.Skip()}
 d:=t.TempDir(); os.Mkdir(d+"/s",0755)
 exec.Command("dd","if=/dev/urandom","of="+d+"/s/f","bs=1M","count=1000").Run(); unix.Sync()
 for i:=0;i<6;i++ {
  noRangeTest = i%2==1
  dst:=fmt.Sprintf("%s/d%d",d,i); os.Mkdir(dst,0755)
  var u0,u1 unix.Rusage; unix.Getrusage(0,&u0)
  s:=time.Now(); copyDir(t,d+"/s",dst,Options{}); e:=time.Since(s)
  unix.Getrusage(0,&u1)
  fmt.Println("norange",noRangeTest,e, u1.Stime.Nano()-u0.Stime.Nano()); unix.Sync()
 }
}
