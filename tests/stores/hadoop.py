"""HDFS as processes: a name node and a data node, with all their files below one folder."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from xml.sax.saxutils import escape

from outlast.ports import free_ports

# Both served within 9 s on two idle cores, formatting included; other work may be slower by far.
_READY_TIMEOUT_S = 120.0
_POLL_S = 0.2
# Hadoop 2.7 is older than Java's modules, and reaches into them.
_JAVA = (
    *("java", "-Xmx400m", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true"),
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in ("java.lang", "java.nio", "sun.nio.ch", "java.util", "java.net")
    ),
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
)
_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_ADMIN = "org.apache.hadoop.hdfs.tools.DFSAdmin"
_LOGGING = """
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n
"""


class Hadoop:
    """One name node and one data node on free ports; a context manager."""

    def __init__(self, jars: Path, folder: Path) -> None:
        self._jars = jars
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.rpc_port, self.web_port, *self._data_ports = free_ports(5)

    def __enter__(self) -> Hadoop:
        self._write_configuration()
        subprocess.run(
            [*self._command(_NAME_NODE), "-format", "-force", "-nonInteractive"],
            check=True,
            capture_output=True,
        )
        try:
            for name in (_NAME_NODE, _DATA_NODE):
                self._start(name)
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End both and remove their files."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def enter_safe_mode(self) -> None:
        """Refuse every change, as after a start without enough data nodes."""
        self._admin("-safemode", "enter")

    def leave_safe_mode(self) -> None:
        """Take changes again."""
        self._admin("-safemode", "leave")

    def freeze_data_node(self) -> None:
        """Accept data and never answer, until `thaw_data_node`."""
        self._processes[_DATA_NODE].send_signal(signal.SIGSTOP)

    def thaw_data_node(self) -> None:
        """Answer again."""
        self._processes[_DATA_NODE].send_signal(signal.SIGCONT)

    def _admin(self, *arguments: str) -> None:
        subprocess.run([*self._command(_ADMIN), *arguments], check=True, capture_output=True)

    def _command(self, main: str) -> list[str]:
        jars = sorted(str(jar) for jar in self._jars.glob("*.jar"))
        path = ":".join([str(self._folder / "conf"), *jars])
        return [*_JAVA, f"-Dhadoop.home.dir={self._folder}", "-cp", path, main]

    def _start(self, main: str) -> None:
        with (self._folder / f"{main.rpartition('.')[2]}.log").open("ab") as log:
            self._processes[main] = subprocess.Popen(
                self._command(main),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_ready(self) -> None:
        """Until a file can be written, which takes the data node and the end of safe mode."""
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        url = f"http://127.0.0.1:{self.web_port}/webhdfs/v1/ready?op=CREATE&user.name=root"
        while True:
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended:\n{self._last_words()}"
            try:
                request = urllib.request.Request(url, method="PUT")
                with urllib.request.build_opener(_FollowPut).open(request, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline_s, self._last_words()
                time.sleep(_POLL_S)

    def _last_words(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)

    def _write_configuration(self) -> None:
        folder = self._folder / "conf"
        for name in ("hdfs", "datanode", "secondary"):
            (folder / "webapps" / name).mkdir(parents=True)
        data, data_web, data_rpc = self._data_ports
        _write_xml(
            folder / "core-site.xml",
            {
                "fs.defaultFS": f"hdfs://127.0.0.1:{self.rpc_port}",
                "hadoop.tmp.dir": str(self._folder / "data"),
            },
        )
        _write_xml(
            folder / "hdfs-site.xml",
            {
                "dfs.replication": "1",
                "dfs.namenode.rpc-address": f"127.0.0.1:{self.rpc_port}",
                "dfs.namenode.http-address": f"127.0.0.1:{self.web_port}",
                "dfs.datanode.address": f"127.0.0.1:{data}",
                "dfs.datanode.http.address": f"127.0.0.1:{data_web}",
                "dfs.datanode.ipc.address": f"127.0.0.1:{data_rpc}",
                "dfs.datanode.hostname": "127.0.0.1",
                "dfs.client.use.datanode.hostname": "true",
                "dfs.namenode.datanode.registration.ip-hostname-check": "false",
                "dfs.webhdfs.enabled": "true",
                "dfs.permissions.enabled": "false",
                "dfs.namenode.safemode.extension": "0",
                "dfs.heartbeat.interval": "1",
            },
        )
        (folder / "log4j.properties").write_text(_LOGGING)


class _FollowPut(urllib.request.HTTPRedirectHandler):
    """The name node sends a writer on to a data node; urllib follows for GET only."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: object,
        code: int,
        msg: str,
        headers: object,
        newurl: str,
    ) -> urllib.request.Request:
        return urllib.request.Request(newurl, method=req.get_method())


def _write_xml(path: Path, settings: dict[str, str]) -> None:
    properties = "\n".join(
        f"<property><name>{name}</name><value>{escape(value)}</value></property>"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{properties}\n</configuration>\n")
