//! Discovery through a kubeconfig and sockets, in real time.

use std::path::{Path, PathBuf};

use super::*;

fn kubeconfig(directory: &Path, server: &str, token: &str) -> PathBuf {
    write_kubeconfig(directory, &json!({"server": server}), &json!({"tokenFile": token}))
}

fn write_kubeconfig(directory: &Path, cluster: &Value, user: &Value) -> PathBuf {
    let path = directory.join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "k", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "serving"}}],
    });
    std::fs::write(&path, config.to_string()).expect("written");
    path
}

#[tokio::test]
async fn a_server_that_goes_and_comes_back_is_found_again() {
    let server = server_with(2);
    let (address, tasks) = server.listen("127.0.0.1:0").await;
    let directory = tempfile::tempdir().expect("a directory");
    let token = directory.path().join("token");
    std::fs::write(&token, "first").expect("written");
    let kubeconfig = kubeconfig(directory.path(), &format!("http://{address}"), &token.to_string_lossy());
    let config = Kubernetes { kubeconfig: Some(kubeconfig.clone()), ..by_selector() };
    let mut world = World::with(&server, config, Access::new(Some(kubeconfig)));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000"]).await;
    server.set(&PODS, "serving", pod("p0003", "10.0.0.3"));
    world.until_urls(&["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]).await;
    assert!(server.tokens().iter().all(|token| token == "Bearer first"), "{:?}", server.tokens());

    drop(tasks);
    std::fs::write(&token, "second").expect("written");
    world.until_problem("cannot ").await;
    world.until_problem("onnection refused").await;
    assert_eq!(world.urls().len(), 3);
    server.delete(&PODS, "serving", "p0001");
    let (_, _tasks) = server.listen(&address.to_string()).await;
    world.until_urls(&["10.0.0.2:8000", "10.0.0.3:8000"]).await;
    assert_eq!(world.seen.status().problem, None);
    assert_eq!(
        server.tokens().last().map(String::as_str),
        Some("Bearer second"),
        "a token that was renewed is read"
    );
}

#[tokio::test]
async fn a_kubeconfig_that_is_wrong_is_named_and_read_again() {
    let server = server_with(1);
    let (address, _tasks) = server.listen("127.0.0.1:0").await;
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("kubeconfig");
    let mut world = World::with(&server, by_selector(), Access::new(Some(path.clone())));
    world.until_problem(&format!("discovery.kubernetes.kubeconfig {}: failed to read", path.display())).await;
    std::fs::write(&path, "current-context: c\n").expect("written");
    world.until_problem("failed to load current context: c").await;
    let token = directory.path().join("token");
    kubeconfig(directory.path(), &format!("http://{address}"), &token.to_string_lossy());
    world.until_problem("failed to read token file").await;
    std::fs::write(&token, "token").expect("written");
    world.until_urls(&["10.0.0.1:8000"]).await;
}

#[tokio::test]
async fn a_kubeconfig_may_name_a_program_for_credentials_but_no_proxy() {
    let server = server_with(1);
    let (address, _tasks) = server.listen("127.0.0.1:0").await;
    let directory = tempfile::tempdir().expect("a directory");
    let version = "client.authentication.k8s.io/v1";
    let credential =
        json!({"apiVersion": version, "kind": "ExecCredential", "status": {"token": "from a program"}})
            .to_string();
    let program = json!({"exec": {
        "apiVersion": version, "command": "echo", "args": [credential], "interactiveMode": "Never",
    }});
    let url = format!("http://{address}");
    let proxied = json!({"server": url, "proxy-url": "http://127.0.0.1:1"});
    let path = write_kubeconfig(directory.path(), &proxied, &program);
    let mut world = World::with(&server, by_selector(), Access::new(Some(path)));
    world
        .until_problem("the kubeconfig has the proxy-url http://127.0.0.1:1/, and kvlane uses no proxies")
        .await;
    write_kubeconfig(directory.path(), &json!({"server": url}), &program);
    world.until_urls(&["10.0.0.1:8000"]).await;
    assert_eq!(server.tokens()[0], "Bearer from a program");
}
