//! The gateway's threads: each has a name and a runtime of its own.

use std::io;
use std::thread::JoinHandle;

use kvlane_fleet::panics::guard;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

/// The number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A runtime for one thread.
pub(crate) fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// A named thread that runs one runtime until its work is done or it is stopped.
pub(crate) fn thread(
    name: &str,
    runtime: Runtime,
    kill: CancellationToken,
    work: impl Future<Output = ()> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let need = !LEISURE.contains(&name);
    std::thread::Builder::new().name(name.into()).spawn(move || {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        guard(&name, need, || {
            runtime.block_on(async {
                tokio::select! {
                    () = async { work.await; kill.cancelled().await } => {}
                    () = kill.cancelled() => {}
                }
            });
            runtime.shutdown_background();
        });
    })
}

/// Threads that requests can do without.
const LEISURE: [&str; 5] = ["traces", "snapshot", "dispatches", "discovery", "replicas"];
