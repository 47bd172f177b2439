//! Where a process runs, as the kernel and its environment have it: container, pod, job of Slurm.
//!
//! Only processes that this user may look at tell it, and only the variables named here are read.

use gputrace_recorder::opened::{of_proc, text_of_proc};
use serde::Serialize;

/// What is known of it. `None` is "not known".
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Surroundings {
    /// Id of the container, by its control group.
    pub(crate) container: Option<String>,
    /// Pod of Kubernetes: its name where the environment has it, else its uid.
    pub(crate) pod: Option<String>,
    /// Namespace of the pod.
    pub(crate) namespace: Option<String>,
    /// Job of Slurm.
    pub(crate) slurm_job: Option<String>,
    /// Why nothing of it may be known.
    pub(crate) unknown: Option<String>,
}

/// Variables by which a pod says its name (the downward API has no fixed ones), and jobs theirs.
const POD_NAMES: [&str; 4] = ["POD_NAME", "MY_POD_NAME", "KUBERNETES_POD_NAME", "K8S_POD_NAME"];
const NAMESPACES: [&str; 3] = ["POD_NAMESPACE", "MY_POD_NAMESPACE", "KUBERNETES_NAMESPACE"];
const JOBS: [&str; 2] = ["SLURM_JOB_ID", "SLURM_JOBID"];

/// Of a process by its number here; `recorded` are variables that its trace has.
pub(crate) fn of(pid: Option<u32>, recorded: &[(String, String)]) -> Surroundings {
    let kept = |name: &str| recorded.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let mut found = Surroundings { slurm_job: JOBS.iter().find_map(|name| kept(name)), ..Default::default() };
    let Some(pid) = pid else {
        found.unknown = Some("the process is not visible from here".to_owned());
        return found;
    };
    match text_of_proc(format!("/proc/{pid}/cgroup")) {
        Ok(groups) => {
            let told = of_groups(&groups);
            (found.container, found.pod) = (told.container, told.pod);
            found.slurm_job = found.slurm_job.or(told.slurm_job);
        }
        Err(error) => found.unknown = Some(format!("its control group: {error}")),
    }
    match of_proc(format!("/proc/{pid}/environ")) {
        Ok(environment) => {
            let first = |names: &[&str]| names.iter().find_map(|name| variable(&environment, name));
            let is_pod = variable(&environment, "KUBERNETES_SERVICE_HOST").is_some();
            let named = first(&POD_NAMES).or_else(|| is_pod.then(|| variable(&environment, "HOSTNAME"))?);
            found.pod = named.or(found.pod);
            found.namespace = first(&NAMESPACES);
            found.slurm_job = found.slurm_job.or_else(|| first(&JOBS));
        }
        Err(error) => found.unknown = found.unknown.or(Some(format!("its environment: {error}"))),
    }
    found
}

fn variable(environment: &[u8], name: &str) -> Option<String> {
    let mut entries = environment.split(|byte| *byte == 0);
    let value = entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    Some(String::from_utf8_lossy(value).into_owned()).filter(|value| !value.is_empty())
}

/// What the paths of control groups say (cgroups(7), both versions; runtimes name their groups after the container).
fn of_groups(groups: &str) -> Surroundings {
    let mut found = Surroundings::default();
    let parts = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).flat_map(|path| path.split('/'));
    for part in parts {
        let bare = part.strip_suffix(".scope").or(part.strip_suffix(".slice")).unwrap_or(part);
        let id = bare.rsplit(['-', ':']).next().unwrap_or_default();
        if id.len() == 64 && id.chars().all(|c| c.is_ascii_hexdigit()) {
            found.container = Some(id.to_owned());
        }
        // `pod<uid>`, or `kubepods-burstable-pod<uid with _>.slice`.
        if let Some((_, uid)) =
            bare.rsplit_once("pod").filter(|(before, _)| before.is_empty() || before.ends_with('-'))
            && uid.len() >= 32
        {
            found.pod = Some(uid.replace('_', "-"));
        }
        if let Some(job) = part.strip_prefix("job_").filter(|job| job.chars().all(|c| c.is_ascii_digit())) {
            found.slurm_job = Some(job.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_groups_of_the_usual_runtimes_name_container_pod_and_job() {
        let id = "0123456789abcdef".repeat(4);
        let uid = "8f5b6c1e-1111-2222-3333-444455556666";
        let told = |path: &str| {
            let found = of_groups(&format!("0::{path}\n"));
            let short = found.container.map(|id| id[..4].to_owned());
            [short, found.pod, found.slurm_job].map(Option::unwrap_or_default).join(" ")
        };
        assert_eq!(told(&format!("/system.slice/docker-{id}.scope")), "0123  ");
        assert_eq!(told(&format!("/docker/{id}")), "0123  ");
        assert_eq!(told(&format!("/machine.slice/libpod-{id}.scope/container")), "0123  ");
        let slice = uid.replace('-', "_");
        let path = format!(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{id}.scope"
        );
        assert_eq!(told(&path), format!("0123 {uid} "));
        assert_eq!(told(&format!("/kubepods/besteffort/pod{uid}/{id}")), format!("0123 {uid} "));
        assert_eq!(told("/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0"), "  4711");
        assert_eq!(told("/user.slice/user-1000.slice/session-3.scope"), "  ");
    }

    #[test]
    fn only_named_variables_are_taken_from_an_environment() {
        let environment = b"SECRET=x\0POD_NAME=train-0\0POD_NAMESPACE=\0";
        assert_eq!(variable(environment, "POD_NAME").as_deref(), Some("train-0"));
        assert_eq!(variable(environment, "POD_NAMESPACE"), None);
        assert_eq!(variable(environment, "POD"), None);
    }
}
