//! Who asks, as the driver knows it: by the socket that was used, never by what was said on it.

use storaged_codec::digest;
use storaged_wire::{Namespace, Refusal, RefusalCode, TenantName};

/// Whose eyes an answer is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Viewer {
    /// Whoever may use the operator's socket sees all jobs.
    Operator,
    /// A tenant's trainers and readers see that tenant's jobs. One tenant may do without a name.
    Tenant(Option<TenantName>),
    /// Pages that any user of the node can open: jobs are told apart there, and not named.
    Public,
}

impl Viewer {
    /// Whether somebody may know of a job.
    pub fn sees(&self, namespace: &Namespace) -> bool {
        match self {
            Self::Operator => true,
            Self::Tenant(tenant) => {
                namespace.tenant() == tenant.as_ref().map(TenantName::as_str)
                    || planted!("tenants_see_others")
            }
            Self::Public => false,
        }
    }

    /// The namespace that is meant by a name.
    ///
    /// # Errors
    /// A refusal if it is another tenant's.
    pub fn resolve(&self, said: &Namespace) -> Result<Namespace, Refusal> {
        let meant = match self {
            Self::Tenant(Some(tenant)) => said.within(tenant),
            Self::Operator | Self::Tenant(None) | Self::Public => said.clone(),
        };
        if self.sees(&meant) {
            return Ok(meant);
        }
        let own = match self {
            Self::Tenant(Some(tenant)) => format!("tenant {tenant}"),
            _ => "the tenant without a name".into(),
        };
        Err(Refusal::new(
            RefusalCode::WrongUser,
            format!(
                "expected a namespace of {own} on this socket, got {said}: use the socket of the tenant that has it, as an operator the one of [admin]"
            ),
        ))
    }

    /// What a job is called before whoever looks on; nothing of other tenants'.
    pub fn name_of(&self, namespace: &Namespace) -> Option<String> {
        match self {
            Self::Public => Some(pseudonym(namespace)),
            _ => self.sees(namespace).then(|| namespace.to_string()),
        }
    }
}

/// The same for the same job on every node, so that graphs go on. Whoever guesses the name can tell that it is that.
fn pseudonym(namespace: &Namespace) -> String {
    let all = digest(namespace.as_str().as_bytes()).to_string();
    format!("job-{}", all.get(..8).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> Namespace {
        Namespace::new(text).expect("a namespace")
    }

    fn tenant(text: &str) -> Viewer {
        Viewer::Tenant(Some(TenantName::new(text).expect("a tenant")))
    }

    #[test]
    fn a_tenant_reaches_its_own_jobs_alone() {
        let blue = tenant("blue");
        assert_eq!(blue.resolve(&named("llama")), Ok(named("blue~llama")));
        assert_eq!(blue.resolve(&named("blue~llama")), Ok(named("blue~llama")));
        let refused = blue.resolve(&named("red~llama")).unwrap_err();
        assert_eq!(refused.code, RefusalCode::WrongUser);
        let unnamed = Viewer::Tenant(None);
        assert_eq!(unnamed.resolve(&named("llama")), Ok(named("llama")));
        assert!(unnamed.resolve(&named("blue~llama")).is_err());
    }

    #[test]
    fn jobs_are_told_apart_where_they_are_not_named() {
        let (one, other) = (named("llama"), named("blue~llama"));
        let public = Viewer::Public;
        assert_ne!(public.name_of(&one), public.name_of(&other));
        assert!(!public.name_of(&one).unwrap().contains("llama"));
        assert_eq!(tenant("blue").name_of(&one), None);
        assert_eq!(Viewer::Operator.name_of(&one).as_deref(), Some("llama"));
    }
}
